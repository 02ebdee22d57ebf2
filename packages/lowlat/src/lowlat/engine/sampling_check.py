"""What sampling parameters may be, for doors that take them as they are."""

from __future__ import annotations

import math

from lowlat.engine.request import SamplingParams

_BOUNDS = {
    "max_tokens": (0, math.inf),
    "min_tokens": (0, math.inf),
    "temperature": (0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (math.ulp(0.0), math.inf),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
    "logprobs": (0, math.inf),
    "prompt_logprobs": (0, math.inf),
}


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises `ValueError` that names the field: a number out of its bounds or not finite, a token that is none."""
    for name, (low, high) in _BOUNDS.items():
        value = getattr(sampling, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name}: {value} is not a number that it may be{_words(low, high)}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise ValueError(f"logit_bias: {bias} for token {token}: use finite numbers, and ids below {vocab_size}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids: {token} is outside the vocabulary of {vocab_size} ids")


def _words(low: float, high: float) -> str:
    if math.isinf(low):
        return ": it must be finite"
    least = "above 0" if 0 < low < 1 else f"{low:g} or more"
    return f": {least}, and finite" if math.isinf(high) else f": {low:g} to {high:g}"
