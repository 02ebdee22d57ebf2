"""Scores and settings on which top-k, top-p and min-p are tried: ties, banned tokens, limits beyond the vocabulary."""

from __future__ import annotations

import torch


def filter_case(vocabulary: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Arguments of `keep_likely` for eight rows."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, vocabulary, generator=generator) * (0.3, 1.0, 4.0)[seed % 3]
    if seed % 2:
        scores = scores.to(torch.bfloat16).float()  # many are equal
    scores[2:5, :: 3 + seed] = float("-inf")
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.2, 1.0, 0.9, 1.1, 0.5])
    top_k = torch.tensor([0, 5, 50, 1, vocabulary + 3, 20, 0, 7])
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.95, 0.3, 1.0, 0.999, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.05, 0.0, 0.3, 0.0, 0.001, 0.02, 0.0], dtype=torch.float64)
    return tuple(part.to(device) for part in (scores, temperature, top_k, top_p, min_p))
