"""FP8 e4m3 values with power-of-two scales (ue8m0), one for each group or block.

Legend of shape suffixes: R rows, K input features, N output features, G groups, B bytes.

A stored ue8m0 byte b means 2^(b - 127). The codecs follow docs/models/deepseek_v41.md, section "Number formats".
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
_ACTIVATION_FLOOR = 1e-10
_ENTRY_SCALE_FLOOR = 1e-4


def ue8m0_ceiling(x: torch.Tensor) -> torch.Tensor:
    """Bytes of the smallest powers of two that are at least `x` (float32, positive, normal)."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    # The exponent field is the power of two below; any mantissa bit moves to the next one.
    return ((bits + 0x7FFFFF) >> 23).to(torch.uint8)


def ue8m0_decode(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of ue8m0 bytes; byte 0 is the subnormal 2^-127, byte 255 is not a number."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """Bytes of the nearest e4m3 values, ties to even, saturating at 448."""
    return x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e4m3 bytes."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def quantise_activations(x_RK: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 bytes [..., K] and ue8m0 bytes [..., K / group], scale 2^ceil(log2(max(amax, 1e-10) / 448))."""
    groups = _groups(x_RK, group)
    amax = groups.abs().amax(-1).clamp_min(_ACTIVATION_FLOOR)
    return _encode(x_RK, groups, ue8m0_ceiling(amax / E4M3_MAX))


def quantise_window_entries(x_RK: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Sliding-window KV: e4m3 bytes [..., K] and ue8m0 bytes [..., K / group], no scale below 2^-13."""
    groups = _groups(x_RK, group)
    scales = ue8m0_ceiling((groups.abs().amax(-1) / E4M3_MAX).clamp_min(_ENTRY_SCALE_FLOOR))
    return _encode(x_RK, groups, scales)


def dequantise_groups(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 values [..., K] of e4m3 bytes with one ue8m0 byte for each K / G values."""
    values = e4m3_decode(codes).reshape(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return (values * ue8m0_decode(scales).unsqueeze(-1)).flatten(-2)


def quantise_blocks(w_NK: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as e4m3 bytes [N, K] and ue8m0 bytes [N / block, K / block]; edge blocks may be partial."""
    rows, columns = w_NK.shape
    padded = torch.nn.functional.pad(w_NK.to(torch.float32), (0, -columns % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scales = ue8m0_ceiling(tiles.abs().amax((1, 3)).clamp_min(_ACTIVATION_FLOOR) / E4M3_MAX)
    return e4m3_encode(w_NK / _spread(ue8m0_decode(scales), rows, columns, block)), scales


def dequantise_blocks(codes_NK: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """float32 weight [N, K] of `quantise_blocks`' bytes.

    Raises:
        ValueError: the scales do not cover the weight in blocks of `block` x `block`.
    """
    rows, columns = codes_NK.shape
    if scales.shape != (-(-rows // block), -(-columns // block)):
        raise ValueError(f"scales {tuple(scales.shape)} do not fit a weight {rows} x {columns} in blocks of {block}")
    return e4m3_decode(codes_NK) * _spread(ue8m0_decode(scales), rows, columns, block)


def _spread(scales: torch.Tensor, rows: int, columns: int, block: int) -> torch.Tensor:
    return scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def _groups(x: torch.Tensor, group: int) -> torch.Tensor:
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} values do not divide into groups of {group}")
    return x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _encode(x: torch.Tensor, groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return e4m3_encode(groups / ue8m0_decode(scales).unsqueeze(-1)).view(x.shape), scales
