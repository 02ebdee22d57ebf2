"""Normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), in the type of `x`."""
    return F.rms_norm(x_RH, weight_H.shape, weight_H, eps)


def head_norm(x_RND: torch.Tensor, weight_ND: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of every head of every row, each head with its own weight."""
    return F.rms_norm(x_RND, x_RND.shape[-1:], None, eps) * weight_ND
