"""What several tests on GPUs ask of an engine."""

from __future__ import annotations

from lowlat.engine.request import SamplingParams

KINDS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.9, seed=2**64 - 5),
    SamplingParams(max_tokens=20, temperature=0.8, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=12, temperature=0.7, seed=4, repetition_penalty=1.2, logit_bias=((7, 2.0),)),
    SamplingParams(max_tokens=10, temperature=0, logprobs=3),
    SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1),
]
PROMPTS = [[(7 * n + k) % 101 for k in range(5 + 30 * n)] for n in range(len(KINDS))]
"""A prompt of every length for each kind of request, for a vocabulary of 101."""
