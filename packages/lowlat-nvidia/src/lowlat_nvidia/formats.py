"""Number formats of DeepSeek-V4.1 in plain PyTorch: FP4 codes, FP8 activations, and the order of packed FP8 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1: magnitudes of the codes 0 to 7; bit 3 is the sign."""
HALF_ORDER = [2, 0, 3, 1]
"""Which of four e4m3 each byte of a word holds: `fp8_to_half` (csrc/quantised.cuh) unpacks the first two at once."""


def fp4_codes(packed: Tensor) -> Tensor:
    """Codes [..., 2 K] uint8 of bytes [..., K] that hold two each, the first in the low half."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def fp4_values(packed: Tensor) -> Tensor:
    """Float32 values [..., 2 K] of such bytes, without their scales."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=packed.device)
    return table[fp4_codes(packed).long()]


def quantise(x_RK: Tensor) -> Tensor:
    """Values after FP8 quantisation in groups of 32 inputs with power-of-two scales, as float32."""
    groups = x_RK.float().view(*x_RK.shape[:-1], -1, 32)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    mantissa, exponent = torch.frexp(largest)
    scale = torch.exp2((exponent - (mantissa == 0.5).int()).float())
    fp8 = (groups / scale).to(torch.float8_e4m3fn).float()
    return (fp8 * scale).view(x_RK.shape)
