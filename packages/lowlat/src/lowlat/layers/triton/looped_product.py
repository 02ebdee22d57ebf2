"""Products of up to sixteen rows with a large weight on tensor cores, with what stands before and after them: addition,
RMSNorm, gated activation. For steps of several requests.

As `row_product`, but a program looks at a part of the input features in each turn, the loads of later parts under way.
A row has the same bits whatever rows are beside it.

Legend of shape suffixes: R rows, I input features, O output features.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early
from lowlat.layers.triton.activation import KINDS, activate

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

MOST_ROWS = 16
_LEAST = 1 << 21
_LINE = tl.constexpr(64)
"""Values of a cache line."""


class LoopShape(msgspec.Struct, frozen=True):
    """Sizes of a launch that are fixed when its kernel is compiled."""

    block_n: int
    """Output features of a program."""
    block_k: int
    """Input features of a turn."""
    stages: int
    """Turns whose loads are under way."""
    warps: int


USUAL = LoopShape(16, 256, 4, 2)
SHAPES = (USUAL, LoopShape(16, 256, 6, 4), LoopShape(32, 128, 5, 4))
"""Those worth a try, by weight and device."""


@triton.jit
def _ask_for(weight_ptr, place_n, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Let a program's first weights come into the cache."""
    line = tl.arange(0, BYTES // 128) * _LINE
    where = weight_ptr + place_n.to(tl.int64)[:, None] * WIDTH + tl.minimum(line, WIDTH - _LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def looped_product_kernel(
    x_ptr, stream_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, outputs, eps, WIDTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`GATE` as in `product_kernel`."""
    if EARLY:
        let_next_start()
    program = tl.program_id(0)
    place_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = place_n < outputs
    upper_ptr = weight_ptr + outputs * WIDTH
    if EARLY:
        # Weights nobody writes, so they may be asked for before the kernel in front has ended.
        last_n = tl.minimum(place_n, outputs - 1)
        if WIDTH >= _LINE:
            _ask_for(weight_ptr, last_n, WIDTH, 2048)
            if GATE >= 0:
                _ask_for(upper_ptr, last_n, WIDTH, 2048)
        wait_for_previous()
    place_r = tl.arange(0, 16)
    inside_r = place_r < rows
    result_rn = tl.zeros([16, BLOCK_N], tl.float32)
    up_rn = tl.zeros([16, BLOCK_N], tl.float32)
    square_r = tl.zeros([16], tl.float32)
    for begin in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        place_k = begin + tl.arange(0, BLOCK_K)
        inside_k = place_k < WIDTH
        offset_kn = place_n.to(tl.int64)[None, :] * WIDTH + place_k[:, None]
        tile_kn = inside_k[:, None] & inside_n[None, :]
        weight = tl.load(weight_ptr + offset_kn, mask=tile_kn, other=0.0)
        offset_rk = place_r[:, None] * WIDTH + place_k[None, :]
        tile_rk = inside_r[:, None] & inside_k[None, :]
        x_rk = tl.load(x_ptr + offset_rk, mask=tile_rk, other=0.0)
        if ADD:
            stream_rk = tl.load(stream_ptr + offset_rk, mask=tile_rk, other=0.0)
            # Rounded to the stream's type before it is normed, as it is when the addition stands alone.
            x_rk = (x_rk.to(tl.float32) + stream_rk.to(tl.float32)).to(stream_rk.dtype)
            if program == 0:
                tl.store(sum_ptr + offset_rk, x_rk, mask=tile_rk)
        if NORM:
            norm_k = tl.load(norm_ptr + place_k, mask=inside_k, other=0.0).to(tl.float32)
            wide_rk = x_rk.to(tl.float32)
            square_r += tl.sum(wide_rk * wide_rk, axis=1)
            x_rk = (wide_rk * norm_k[None, :]).to(x_rk.dtype)
        result_rn = tl.dot(x_rk, weight, result_rn, input_precision="ieee")
        if GATE >= 0:
            up_weight = tl.load(upper_ptr + offset_kn, mask=tile_kn, other=0.0)
            up_rn = tl.dot(x_rk, up_weight, up_rn, input_precision="ieee")
    if NORM:
        scale_r = tl.rsqrt(square_r / WIDTH + eps)
        result_rn *= scale_r[:, None]
        up_rn *= scale_r[:, None]
    if BIAS:
        result_rn += tl.load(bias_ptr + place_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        if GATE >= 0:
            up_rn += tl.load(bias_ptr + outputs + place_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if GATE >= 0:
        result_rn = activate(result_rn, GATE) * up_rn
    rounded_rn = result_rn.to(weight_ptr.dtype.element_ty)
    tile_rn = inside_r[:, None] & inside_n[None, :]
    out_rn = out_ptr + place_r[:, None] * outputs + place_n[None, :]
    tl.store(out_rn, rounded_rn.to(out_ptr.dtype.element_ty), mask=tile_rn)


def fits(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether this kernel is for such a product: few rows, a weight that takes longer to read than a launch, and sums
    that tensor cores can make."""
    return 1 < rows <= MOST_ROWS and weight_OI.dtype == torch.bfloat16 and weight_OI.numel() >= _LEAST


def looped_product(
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
    shape: LoopShape = USUAL,
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
    looped_product_kernel[(triton.cdiv(outputs, shape.block_n),)](
        x_RI, x_RI if stream_RI is None else stream_RI, x_RI if norm_I is None else norm_I, weight_OI,
        x_RI if bias_O is None else bias_O, out_RO, sum_RI, rows, outputs, eps, WIDTH=width,
        ADD=stream_RI is not None, NORM=norm_I is not None, GATE=-1 if activation is None else KINDS[activation],
        BIAS=bias_O is not None, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, STAGES=shape.stages,
        EARLY=early_start, num_warps=shape.warps, **early.launch_options(early_start),
    )  # fmt: skip
    return out_RO, sum_RI
