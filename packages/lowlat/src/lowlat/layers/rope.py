"""Rotary position embedding (Su et al. 2021), with the frequency scalings of published models.

Legend of shape suffixes: R rows, N heads, D head dimension, P positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class Rope:
    """Cosines and sines of every position, [P, D] float32, halves repeated: the rotate-half convention."""

    def __init__(
        self, head_dim: int, theta: float, positions: int, scaling: dict[str, Any] | None, device: torch.device
    ) -> None:
        frequencies, scale = _frequencies(head_dim, theta, scaling)
        angles_PD = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).repeat(1, 2)
        self._cos_PD = (angles_PD.cos() * scale).to(device)
        # The first half of the sine is negative: x * cos + swap_halves(x) * sin is then the whole rotation.
        sin_PD = angles_PD.sin() * scale
        sin_PD[:, : head_dim // 2].neg_()
        self._sin_PD = sin_PD.to(device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of every position, each [P, D] float32."""
        return self._cos_PD, self._sin_PD

    def rows(self, positions_R: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for rows at `positions_R`, each [R, 1, D], once a step for all layers."""
        cos_R1D = self._cos_PD.index_select(0, positions_R).unsqueeze(1).to(dtype)
        return cos_R1D, self._sin_PD.index_select(0, positions_R).unsqueeze(1).to(dtype)


def rotate(x_RND: torch.Tensor, cos_R1D: torch.Tensor, sin_R1D: torch.Tensor) -> torch.Tensor:
    """Rotate every head of every row to its position."""
    half = x_RND.shape[-1] // 2
    swapped_RND = torch.roll(x_RND, half, dims=-1)
    return (x_RND * cos_R1D).addcmul_(swapped_RND, sin_R1D)


def _frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Angles a position, [D/2], and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = torch.pow(theta, -exponents)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return base, 1.0
    if kind == "linear":
        return base / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(base, scaling), 1.0
    if kind == "yarn":
        return _yarn(base, theta, scaling), _yarn_scale(scaling)
    raise ValueError(f"rope scaling {kind!r} is not supported; known: default, linear, llama3, yarn")


def _yarn(base: torch.Tensor, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """YaRN (Peng et al. 2023): dimensions that turn often within the original context keep their frequency, those that
    turn less than once are divided by `factor`, with a ramp over dimensions between."""
    original = scaling["original_max_position_embeddings"]
    head_dim = 2 * len(base)

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    interpolated = ((torch.arange(len(base), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    result: torch.Tensor = base * (1 - interpolated) + base / scaling["factor"] * interpolated
    return result


def _yarn_scale(scaling: dict[str, Any]) -> float:
    """Factor on cosine and sine: as given, or 0.1 m ln(factor) + 1, for a ratio of two m where there are two."""
    if given := scaling.get("attention_factor"):
        return float(given)

    def grown(m: float) -> float:
        return 0.1 * m * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(m) / grown(m_all) if m and m_all else grown(1.0)


def _llama3(base: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between them."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * math.pi / base
    ramp = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    result: torch.Tensor = base / scaling["factor"] * (1 - ramp) + base * ramp
    return result
