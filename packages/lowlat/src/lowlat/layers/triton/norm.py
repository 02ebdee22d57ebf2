"""RMSNorm, alone and with the addition before it.

Legend of shape suffixes: R rows, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    x = tl.load(x_ptr + row * width + place, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * width + place, mask=inside, other=0.0)
        # The sum is rounded to the stream's type before it is normed, as it is when the addition stands alone.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row * width + place, x, mask=inside)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + place, (wide * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, early_start: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight for rows in memory one after another, in the type of `x`."""
    return _launch(x_RH, None, weight_H, eps, early_start)


def add_rms_norm(
    x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float, *, early_start: bool = False
) -> torch.Tensor:
    """`residual_RH` += `x_RH`, rounded to its type; returns `rms_norm` of the sum."""
    return _launch(x_RH, residual_RH, weight_H, eps, early_start)


def _launch(
    x_RH: torch.Tensor, residual_RH: torch.Tensor | None, weight_H: torch.Tensor, eps: float, early_start: bool
) -> torch.Tensor:
    rows, width = x_RH.shape
    assert x_RH.is_contiguous()
    assert residual_RH is None or residual_RH.is_contiguous()
    out_RH = torch.empty_like(x_RH)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        x_RH,
        x_RH if residual_RH is None else residual_RH,
        weight_H,
        out_RH,
        width,
        eps,
        ADD=residual_RH is not None,
        BLOCK=block,
        num_warps=warps_for(block),
        EARLY=early_start,
        **early.launch_options(early_start),
    )
    return out_RH


def warps_for(block: int) -> int:
    """Warps of a program that holds one row of `block` elements: eight or more elements a thread."""
    return min(16, max(1, block // 256))
