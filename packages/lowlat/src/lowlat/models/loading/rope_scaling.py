"""The scaling of rotary embeddings, from GGUF's form to config.json's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lowlat.models.loading.gguf import GGUFError

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def rope_scaling_of(
    metadata: Mapping[str, Any],
    factors: np.ndarray[Any, np.dtype[np.float32]] | None,
    *,
    theta: float,
    head_dim: int,
    context: int,
) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json, or None where positions are not scaled.

    Args:
        metadata: of the GGUF file, keys of its architecture without their prefix.
        factors: float32 [head_dim / 2], by which the file divides each frequency (its tensor rope_freqs), if any.
        theta: base of the frequencies.
        head_dim: values of a head that are rotated.
        context: longest sequence of the model, in tokens.

    Raises:
        GGUFError: a scaling of another kind than linear, yarn and Llama 3.
    """
    if factors is not None:
        return _llama3(factors, theta, head_dim)
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = metadata.get("rope.scaling.factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float) or not factor > 0:
        raise GGUFError(f"rotary scaling {kind!r} with factor {factor!r} is not supported; linear and yarn are")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length", round(context / factor))
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _llama3(factors: np.ndarray[Any, np.dtype[np.float32]], theta: float, head_dim: int) -> dict[str, Any]:
    """Finds Llama 3's scaling behind its factors: they are stored already computed, the configuration is not."""
    factor = float(factors.max())
    expected = llama3_factors(factor, theta=theta, head_dim=head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise GGUFError(
            "the factors of its rotary frequencies (tensor rope_freqs.weight) are not those of Llama 3; "
            "use the model's Hugging Face folder instead"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def llama3_factors(factor: float, *, theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Divisors of the frequencies in Llama 3.1 and later, float64 [head_dim / 2].

    Wave lengths below context / 4 stay, those above context / 1 grow by `factor`, those between are blended
    (Llama 3.1 model card and reference code, context 8192).
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    blended: np.ndarray[Any, np.dtype[np.float64]] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return blended
