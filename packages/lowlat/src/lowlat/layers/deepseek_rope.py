"""Rotary positions on the tail of a head, in neighbouring pairs.

Legend of shape suffixes: R rows, P rotated pairs, D head dimension.
"""

from __future__ import annotations

import math

import torch


def frequencies(pairs: int, theta: float) -> torch.Tensor:
    """theta^(-i / pairs), float64 [P] (Su et al. 2021)."""
    return theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def yarn_frequencies(
    pairs: int, theta: float, *, factor: float, original: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """YaRN (Peng et al. 2023) without an attention factor: fast pairs keep their frequency, slow ones are divided."""
    dim = 2 * pairs

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(pair_turning(beta_fast)))
    high = min(dim - 1, math.ceil(pair_turning(beta_slow)))
    ramp = ((torch.arange(pairs, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    base = frequencies(pairs, theta)
    result: torch.Tensor = base * (1 - ramp) + base / factor * ramp
    return result


class TailRope:
    """Rotates the last 2 P dimensions by position times frequency."""

    def __init__(self, omega_P: torch.Tensor) -> None:
        self.omega_P = omega_P

    def rotate(self, x: torch.Tensor, positions_R: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """`x` is [R, ..., D]; not rounded. Angles are float64 before their cosines, so large positions stay exact."""
        angle = positions_R.to(torch.float64).unsqueeze(-1) * self.omega_P
        shape = (len(x), *([1] * (x.dim() - 2)), -1)
        cos = angle.cos().view(shape).to(x.dtype)
        sin = angle.sin().view(shape).to(x.dtype)
        if inverse:
            sin = -sin
        width = 2 * len(self.omega_P)
        head, tail = x[..., :-width], x[..., -width:]
        even, odd = tail[..., 0::2], tail[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        return torch.cat([head, turned], -1)
