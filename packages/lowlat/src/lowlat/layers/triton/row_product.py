"""Products of up to sixteen rows with a small weight on tensor cores, with what stands before and after them: addition,
RMSNorm, gated activation. For steps of several rows of a small model, where each launch costs more than its work.

As `product`, but a program multiplies all rows at once, and its warps share the input features: each sums over a part.

Legend of shape suffixes: R rows, I input features, O output features, G parts of the input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early
from lowlat.layers.triton.activation import KINDS, activate

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

MOST_ROWS = 16
# Of the input features, one for each warp.
PARTS = 8
# Output features of a program.
_OUTPUTS = 16
# Beyond so many input features a program's registers are too few.
_WIDEST = 2048


@triton.jit
def row_product_kernel(
    x_ptr, stream_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, outputs, eps, WIDTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`PART` input features for each of `PARTS`, `BLOCK_K` is that as a power of two; `GATE` as in `product_kernel`."""
    if EARLY:
        let_next_start()
    program = tl.program_id(0)
    place_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = place_n < outputs
    place_k = tl.arange(0, BLOCK_K)
    place_gk = tl.arange(0, PARTS)[:, None] * PART + place_k[None, :]
    inside_gk = (place_k < PART)[None, :] & (place_gk < WIDTH)
    tile_gkn = inside_gk[:, :, None] & inside_n[None, None, :]
    offset_gkn = place_n.to(tl.int64)[None, None, :] * WIDTH + place_gk[:, :, None]
    weight = tl.load(weight_ptr + offset_gkn, mask=tile_gkn, other=0.0, eviction_policy="evict_first")
    if GATE >= 0:
        upper_ptr = weight_ptr + outputs * WIDTH
        up_weight = tl.load(upper_ptr + offset_gkn, mask=tile_gkn, other=0.0, eviction_policy="evict_first")
    if NORM:
        norm_gk = tl.load(norm_ptr + place_gk, mask=inside_gk, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous()
    place_r = tl.arange(0, 16)
    inside_r = place_r < rows
    tile_grk = inside_gk[:, None, :] & inside_r[None, :, None]
    offset_grk = place_r[None, :, None] * WIDTH + place_gk[:, None, :]
    x_grk = tl.load(x_ptr + offset_grk, mask=tile_grk, other=0.0)
    if ADD:
        stream_grk = tl.load(stream_ptr + offset_grk, mask=tile_grk, other=0.0)
        # Rounded to the stream's type before it is normed, as it is when the addition stands alone.
        x_grk = (x_grk.to(tl.float32) + stream_grk.to(tl.float32)).to(stream_grk.dtype)
        if program == 0:
            tl.store(sum_ptr + offset_grk, x_grk, mask=tile_grk)
    if NORM:
        wide_grk = x_grk.to(tl.float32)
        square_r = tl.sum(tl.sum(wide_grk * wide_grk, axis=2), axis=0)
        x_grk = (wide_grk * norm_gk[:, None, :]).to(x_grk.dtype)
        scale_r = tl.rsqrt(square_r / WIDTH + eps)
    result_rn = tl.sum(tl.dot(x_grk, weight, input_precision="ieee"), axis=0)
    if NORM:
        result_rn *= scale_r[:, None]
    if BIAS:
        result_rn += tl.load(bias_ptr + place_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if GATE >= 0:
        up_rn = tl.sum(tl.dot(x_grk, up_weight, input_precision="ieee"), axis=0)
        if NORM:
            up_rn *= scale_r[:, None]
        if BIAS:
            up_rn += tl.load(bias_ptr + outputs + place_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        result_rn = activate(result_rn, GATE) * up_rn
    rounded_rn = result_rn.to(weight.dtype)
    tile_rn = inside_r[:, None] & inside_n[None, :]
    out_rn = out_ptr + place_r[:, None] * outputs + place_n[None, :]
    tl.store(out_rn, rounded_rn.to(out_ptr.dtype.element_ty), mask=tile_rn)


def parts_of(width: int) -> tuple[int, int]:
    """Input features of a part, and the power of two that holds them."""
    part = triton.cdiv(triton.cdiv(width, PARTS), 16) * 16
    return part, triton.next_power_of_2(part)


def fits(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether these kernels are for such a product: few rows, a weight whose reading takes no longer than a launch, and
    sums that tensor cores can make."""
    outputs, width = weight_OI.shape
    small = width <= _WIDEST and outputs * width <= 1 << 21
    return 1 < rows <= MOST_ROWS and small and weight_OI.dtype == torch.bfloat16


def row_product(
    x_RI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    stream_RI: torch.Tensor | None = None,
    norm_I: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    early_start: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `product.product`, of products that `fits`. What is multiplied is rounded to the weight's type, as it is after
    a norm that stands alone, but the norm's factor for the whole row comes after the sums."""
    rows, width = x_RI.shape
    outputs = len(weight_OI) // (1 if activation is None else 2)
    assert x_RI.is_contiguous()
    assert weight_OI.is_contiguous()
    assert stream_RI is None or stream_RI.is_contiguous()
    out_RO = torch.empty(rows, outputs, dtype=out_dtype or weight_OI.dtype, device=x_RI.device)
    sum_RI = x_RI if stream_RI is None else torch.empty_like(x_RI)
    part, block_k = parts_of(width)
    row_product_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        x_RI, x_RI if stream_RI is None else stream_RI, x_RI if norm_I is None else norm_I, weight_OI,
        x_RI if bias_O is None else bias_O, out_RO, sum_RI, rows, outputs, eps, WIDTH=width,
        ADD=stream_RI is not None, NORM=norm_I is not None, GATE=-1 if activation is None else KINDS[activation],
        BIAS=bias_O is not None, PARTS=PARTS, PART=part, BLOCK_K=block_k, BLOCK_N=_OUTPUTS,
        EARLY=early_start, num_warps=PARTS, **early.launch_options(early_start),
    )  # fmt: skip
    return out_RO, sum_RI
