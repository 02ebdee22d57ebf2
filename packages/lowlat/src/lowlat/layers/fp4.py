"""FP4 e2m1 values, two a byte (even index in the low half), with e4m3 or ue8m0 scales for each group.

Legend of shape suffixes: R rows, K values.

The codecs follow docs/models/deepseek_v41.md, section "Number formats".
"""

from __future__ import annotations

import torch

from lowlat.layers.fp8 import e4m3_decode, e4m3_encode, ue8m0_ceiling, ue8m0_decode

E2M1_MAX = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A value above an odd code's lower boundary or at an even code's one gets that code: ties go to even codes.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of the nearest e2m1 values, ties to the even code, saturating at 6."""
    magnitude = x.abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for code, boundary in enumerate(_BOUNDARIES, start=1):
        codes += (magnitude > boundary) if code % 2 else (magnitude >= boundary)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of codes 0..15."""
    table = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), device=codes.device)
    return table[codes.to(torch.int64)]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: [..., K] -> [..., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`; takes int8 or uint8 bytes."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def quantise_main_entries(x_RK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed KV: packed bytes [..., K / 2] and e4m3 scale bytes [..., K / 16].

    The scale is e4m3(clamp(amax / 6, 2^-9, 448)); codes are those of the true quotient.
    """
    groups = _groups(x_RK, 16)
    scales = e4m3_encode((groups.abs().amax(-1) / E2M1_MAX).clamp(2.0**-9, 448.0))
    codes = e2m1_encode(groups / e4m3_decode(scales).unsqueeze(-1))
    return pack(codes.flatten(-2)), scales


def dequantise_main_entries(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values [..., K] of `quantise_main_entries`' bytes; exact in bfloat16."""
    values = e2m1_decode(unpack(packed)).reshape(*scales.shape, 16)
    return (values * e4m3_decode(scales).unsqueeze(-1)).flatten(-2)


def quantise_groups(x_RK: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys and queries, expert weights: packed bytes and ue8m0 bytes, 2^ceil(log2(max(amax, 6 * 2^-126) / 6))."""
    groups = _groups(x_RK, group)
    amax = groups.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-126)
    scales = ue8m0_ceiling(amax / E2M1_MAX)
    codes = e2m1_encode(groups / ue8m0_decode(scales).unsqueeze(-1))
    return pack(codes.flatten(-2)), scales


def dequantise_groups(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values [..., K] of packed bytes with one ue8m0 byte for each K / G values."""
    values = e2m1_decode(unpack(packed)).reshape(*scales.shape, 2 * packed.shape[-1] // scales.shape[-1])
    return (values * ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} values do not divide into groups of {group}")
    return x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)
