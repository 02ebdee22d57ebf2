"""Products of few rows with a weight, with what stands before and after them: addition, RMSNorm, gated activation.

A program computes a few output features from their whole weight rows. It asks for those before it waits for the kernel
that makes its input (see `early`), so weights are read without pauses. A row's result is the same bits
whatever rows are beside it. Each program norms the rows anew, which costs less than a kernel of its own.

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

# Bytes of weights that a program holds, usually and at most, and a warp. Measured on an H200: smaller programs norm the
# same row too often, larger ones wait for their last warp.
_TILE_BYTES = 32768
_LARGEST_TILE = 65536
_WARP_BYTES = 8192
# Programs wanted at least: two for each multiprocessor or nearly.
_PROGRAMS = 256


def most_rows(outputs: int, width: int, *, norm: bool) -> int:
    """Rows up to which these kernels are faster than products on tensor cores; with a `norm`, than a norm by itself and
    one of the two. Measured on an H200, product by product; at a width of 2,048 a program has one warp, for which four
    rows are too much (8.7 us for 2,048 outputs, where eight rows by cuBLAS take 6.3). Few outputs have smaller programs
    then, and a kernel of cuBLAS would break a chain of launches that overlap."""
    if norm or width > 8192:
        return 1
    if 1024 < width <= 2048 and outputs > 1024:
        return 2
    return 4 if outputs * width <= 8 << 20 else 2


@triton.jit
def product_kernel(
    x_ptr, stream_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, outputs, eps, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`ROWS`: `rows` or more. `GATE`: -1, or an activation; the weight then has the rows of the gates before those of
    what they gate."""
    if EARLY:
        let_next_start()
    program = tl.program_id(0)
    place_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    place_k = tl.arange(0, BLOCK_K)
    inside_n = place_n < outputs
    inside_k = place_k < WIDTH
    tile = inside_n[:, None] & inside_k[None, :]
    offset = place_n.to(tl.int64)[:, None] * WIDTH + place_k[None, :]
    weight = tl.load(weight_ptr + offset, mask=tile, other=0.0, eviction_policy="evict_first")
    if GATE >= 0:
        upper_ptr = weight_ptr + outputs * WIDTH
        up_weight = tl.load(upper_ptr + offset, mask=tile, other=0.0, eviction_policy="evict_first")
    if NORM:
        norm_k = tl.load(norm_ptr + place_k, mask=inside_k, other=0.0).to(tl.float32)
    if BIAS:
        bias_n = tl.load(bias_ptr + place_n, mask=inside_n, other=0.0).to(tl.float32)
        if GATE >= 0:
            up_bias_n = tl.load(bias_ptr + outputs + place_n, mask=inside_n, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous()

    for row in tl.static_range(ROWS):
        inside_x = inside_k & (row < rows)
        x_k = tl.load(x_ptr + row * WIDTH + place_k, mask=inside_x, other=0.0)
        if ADD:
            stream_k = tl.load(stream_ptr + row * WIDTH + place_k, mask=inside_x, other=0.0)
            # Rounded to the stream's type before it is normed, as it is when the addition stands alone.
            x_k = (x_k.to(tl.float32) + stream_k.to(tl.float32)).to(stream_k.dtype)
            if program == 0:
                tl.store(sum_ptr + row * WIDTH + place_k, x_k, mask=inside_x)
        wide_k = x_k.to(tl.float32)
        scale = 1.0
        if NORM:
            # The factor of the whole row comes after the product, so that both sums run side by side.
            scale = tl.rsqrt(tl.sum(wide_k * wide_k, axis=0) / WIDTH + eps)
            wide_k = wide_k * norm_k
        result_n = tl.sum(weight.to(tl.float32) * wide_k[None, :], axis=1) * scale
        if BIAS:
            result_n += bias_n
        if GATE >= 0:
            up_n = tl.sum(up_weight.to(tl.float32) * wide_k[None, :], axis=1) * scale
            if BIAS:
                up_n += up_bias_n
            result_n = activate(result_n, GATE) * up_n
        rounded_n = result_n.to(weight.dtype)
        out_n = out_ptr + row * outputs + place_n
        tl.store(out_n, rounded_n.to(out_ptr.dtype.element_ty), mask=inside_n & (row < rows))


class ProductShape(msgspec.Struct, frozen=True):
    """Sizes of a launch that are fixed when its kernel is compiled."""

    block_n: int
    """Output features of a program."""
    block_k: int
    warps: int

    @classmethod
    def of(cls, outputs: int, width: int, element_bytes: int, *, gated: bool, rows: int = 1) -> ProductShape | None:
        """For a weight [`outputs`, `width`], or two of them where it is gated; None: its rows are too long. A row has
        the same bits by any number of `rows`: warps share a weight's row in the same way."""
        block_k = max(16, triton.next_power_of_2(width))
        each = block_k * element_bytes * (2 if gated else 1)
        if each > _LARGEST_TILE:
            return None
        if each <= 4096 and outputs <= 8192:
            # More outputs of a width of 2,048 and more than two rows do not fit a warp's registers.
            return cls(2 if gated or (rows > 2 and each > 2048) else 4, block_k, 1)
        block_n = max(1, min(16, _TILE_BYTES // each))
        while block_n > 1 and outputs < _PROGRAMS * block_n:
            block_n //= 2
        return cls(block_n, block_k, max(4, block_n * each // _WARP_BYTES))


def product(
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
    shape: ProductShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows of `x_RI`, plus those of `stream_RI`, normed where there is a `norm_I`, times the weight, plus the bias.

    For few rows: each is spelled out in the kernel. With an `activation` (as `KINDS` names it) the first half of the
    output features gates the second. Sums are float32; the result is rounded to the weight's type, and has `out_dtype`
    where given. All tensors are contiguous.

    Returns:
        the result [R, O], O halved by an activation, and the sum of `x_RI` and `stream_RI` (`x_RI` where there is no
        stream); None where the weight's rows are too long.
    """
    rows, width = x_RI.shape
    outputs = len(weight_OI) // (1 if activation is None else 2)
    size = weight_OI.element_size()
    shape = shape or ProductShape.of(outputs, width, size, gated=activation is not None, rows=rows)
    if shape is None:
        return None
    assert x_RI.is_contiguous()
    assert weight_OI.is_contiguous()
    assert stream_RI is None or stream_RI.is_contiguous()
    out_RO = torch.empty(rows, outputs, dtype=out_dtype or weight_OI.dtype, device=x_RI.device)
    sum_RI = x_RI if stream_RI is None else torch.empty_like(x_RI)
    product_kernel[(triton.cdiv(outputs, shape.block_n),)](
        x_RI, x_RI if stream_RI is None else stream_RI, x_RI if norm_I is None else norm_I, weight_OI,
        x_RI if bias_O is None else bias_O, out_RO, sum_RI, rows, outputs, eps,
        ROWS=triton.next_power_of_2(rows), WIDTH=width, ADD=stream_RI is not None, NORM=norm_I is not None,
        GATE=-1 if activation is None else KINDS[activation], BIAS=bias_O is not None,
        BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, EARLY=early_start, num_warps=shape.warps,
        **early.launch_options(early_start),
    )  # fmt: skip
    return out_RO, sum_RI
