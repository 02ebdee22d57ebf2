"""Rotary frequencies as a checkpoint's configuration describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowlat_nvidia.dense.plan import UnsupportedShapeError


def frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] float64, radians a position. Plain, `linear` and `llama3` scaling.

    `llama3` (the formula of the Llama 3.1 release): wavelengths under `original / high_freq_factor` stay, those over
    `original / low_freq_factor` grow by `factor`, and what lies between is blended.
    Raises UnsupportedShapeError for other kinds.
    """
    joined = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or joined
    theta = float(joined.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return plain
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return plain / factor
    if kind != "llama3":
        raise UnsupportedShapeError(f"rope type is {kind!r}; 'default', 'linear' and 'llama3' are computed")
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (blend + (1 - blend) / factor)


def rotary_table(frequency: Tensor, positions: int, device: str) -> Tensor:
    """[positions, 2, head_dim / 2] float32: cosine and sine."""
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequency.to(device)
    return torch.stack([angle.cos(), angle.sin()], 1).float()
