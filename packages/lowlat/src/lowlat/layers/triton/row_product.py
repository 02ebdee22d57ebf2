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
PARTS = 4
# Input features of a part that are multiplied at once.
_PIECE = tl.constexpr(128)
# Output features of a program.
_OUTPUTS = 16
# Beyond so many input features a program's shared memory is too small.
_WIDEST = 2560


@triton.jit
def _weights(weight_ptr, place_n, inside_n, FIRST: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr,
             PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Weights [parts, outputs, features] of features `FIRST` on, `PART` for each part."""
    place_k = tl.arange(0, BLOCK)
    place_gk = FIRST + tl.arange(0, PARTS)[:, None] * PART + place_k[None, :]
    tile_gnk = ((place_k < PART)[None, :] & (place_gk < WIDTH))[:, None, :] & inside_n[None, :, None]
    offset_gnk = place_n.to(tl.int64)[None, :, None] * WIDTH + place_gk[:, None, :]
    return tl.load(weight_ptr + offset_gnk, mask=tile_gnk, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(x_ptr, stream_ptr, norm_ptr, sum_ptr, rows, program, FIRST: tl.constexpr, PART: tl.constexpr,
            WIDTH: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
            BLOCK_R: tl.constexpr):  # fmt: skip
    """What is multiplied with them, [parts, features, rows], and the sums of the rows' squares."""
    place_k = tl.arange(0, BLOCK)
    place_r = tl.arange(0, BLOCK_R)
    place_gk = FIRST + tl.arange(0, PARTS)[:, None] * PART + place_k[None, :]
    inside_gk = (place_k < PART)[None, :] & (place_gk < WIDTH)
    tile_gkr = inside_gk[:, :, None] & (place_r < rows)[None, None, :]
    offset_gkr = place_r[None, None, :] * WIDTH + place_gk[:, :, None]
    x_gkr = tl.load(x_ptr + offset_gkr, mask=tile_gkr, other=0.0)
    if ADD:
        stream_gkr = tl.load(stream_ptr + offset_gkr, mask=tile_gkr, other=0.0)
        # Rounded to the stream's type before it is normed, as it is when the addition stands alone.
        x_gkr = (x_gkr.to(tl.float32) + stream_gkr.to(tl.float32)).to(stream_gkr.dtype)
        if program == 0:
            tl.store(sum_ptr + offset_gkr, x_gkr, mask=tile_gkr)
    square_r = tl.zeros([BLOCK_R], tl.float32)
    if NORM:
        norm_gk = tl.load(norm_ptr + place_gk, mask=inside_gk, other=0.0).to(tl.float32)
        wide_gkr = x_gkr.to(tl.float32)
        square_r = tl.sum(tl.sum(wide_gkr * wide_gkr, axis=1), axis=0)
        x_gkr = (wide_gkr * norm_gk[:, :, None]).to(x_gkr.dtype)
    return x_gkr, square_r


@triton.jit
def row_product_kernel(
    x_ptr, stream_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, outputs, eps, WIDTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Features are taken in `WHOLE` pieces of `_PIECE` for each of `PARTS`, and one of `PART`, of which `BLOCK_K` is
    the power of two, 0: none. `GATE` as in `product_kernel`."""
    program = tl.program_id(0)
    place_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = place_n < outputs
    upper_ptr = weight_ptr + outputs * WIDTH
    weights, up_weights = (), ()
    for piece in tl.static_range(WHOLE):
        first = piece * PARTS * _PIECE
        weights += (_weights(weight_ptr, place_n, inside_n, first, _PIECE, WIDTH, PARTS, _PIECE),)  # type: ignore[assignment]
        if GATE >= 0:
            up_weights += (_weights(upper_ptr, place_n, inside_n, first, _PIECE, WIDTH, PARTS, _PIECE),)  # type: ignore[assignment]
    if BLOCK_K > 0:
        weights += (_weights(weight_ptr, place_n, inside_n, WHOLE * PARTS * _PIECE, PART, WIDTH, PARTS, BLOCK_K),)  # type: ignore[assignment]
        if GATE >= 0:
            up_weights += (_weights(upper_ptr, place_n, inside_n, WHOLE * PARTS * _PIECE, PART, WIDTH, PARTS, BLOCK_K),)  # type: ignore[assignment]
    if EARLY:
        wait_for_previous()
        # Not before: where programs of many kernels wait on a processor, new ones crowd on the others.
        let_next_start()
    square_r = tl.zeros([BLOCK_R], tl.float32)
    result_gnr = tl.zeros([PARTS, BLOCK_N, BLOCK_R], tl.float32)
    up_gnr = tl.zeros([PARTS, BLOCK_N, BLOCK_R], tl.float32)
    for piece in tl.static_range(WHOLE + (BLOCK_K > 0)):
        x_gkr, more_r = _inputs(
            x_ptr, stream_ptr, norm_ptr, sum_ptr, rows, program, piece * PARTS * _PIECE,
            _PIECE if piece < WHOLE else PART, WIDTH, ADD, NORM, PARTS, _PIECE if piece < WHOLE else BLOCK_K, BLOCK_R,
        )  # fmt: skip
        square_r += more_r
        result_gnr = tl.dot(weights[piece], x_gkr, result_gnr, input_precision="ieee")
        if GATE >= 0:
            up_gnr = tl.dot(up_weights[piece], x_gkr, up_gnr, input_precision="ieee")
    result_nr = tl.sum(result_gnr, axis=0)
    if NORM:
        scale_r = tl.rsqrt(square_r / WIDTH + eps)
        result_nr *= scale_r[None, :]
    if BIAS:
        result_nr += tl.load(bias_ptr + place_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    if GATE >= 0:
        up_nr = tl.sum(up_gnr, axis=0)
        if NORM:
            up_nr *= scale_r[None, :]
        if BIAS:
            up_nr += tl.load(bias_ptr + outputs + place_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
        result_nr = activate(result_nr, GATE) * up_nr
    place_r = tl.arange(0, BLOCK_R)
    rounded_nr = result_nr.to(weight_ptr.dtype.element_ty)
    out_nr = out_ptr + place_r[None, :] * outputs + place_n[:, None]
    tl.store(out_nr, rounded_nr.to(out_ptr.dtype.element_ty), mask=inside_n[:, None] & (place_r < rows)[None, :])


def parts_of(width: int) -> tuple[int, int, int]:
    """Whole pieces, the features of the last one that each part has, and the power of two that holds those."""
    whole = width // (PARTS * _PIECE.value)
    part = triton.cdiv(triton.cdiv(width - whole * PARTS * _PIECE.value, PARTS), 16) * 16
    return whole, part, triton.next_power_of_2(part) if part else 0


def fits(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether these kernels are for such a product: few rows, a weight whose reading takes no longer than a launch, and
    sums that tensor cores can make."""
    small = weight_OI.shape[1] <= _WIDEST and weight_OI.numel() <= 1 << 21
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
    whole, part, block_k = parts_of(width)
    row_product_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        x_RI, x_RI if stream_RI is None else stream_RI, x_RI if norm_I is None else norm_I, weight_OI,
        x_RI if bias_O is None else bias_O, out_RO, sum_RI, rows, outputs, eps, WIDTH=width,
        ADD=stream_RI is not None, NORM=norm_I is not None, GATE=-1 if activation is None else KINDS[activation],
        BIAS=bias_O is not None, PARTS=PARTS, WHOLE=whole, PART=part, BLOCK_K=block_k, BLOCK_N=_OUTPUTS,
        BLOCK_R=8 if rows <= 8 else 16, EARLY=early_start, num_warps=PARTS, **early.launch_options(early_start),
    )  # fmt: skip
    return out_RO, sum_RI
