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
from lowlat.layers.triton.pin import pinned

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

MOST_ROWS = 16
# Output features of a program, and of one of a head.
_OUTPUTS, _HEADS_OUTPUTS = 16, 32
# More output features are a vocabulary's; of more input features too few programs would have room beside each other.
_LEAST_HEAD, _WIDEST_HEAD = 16384, 1024
# Beyond so many input features a program's shared memory is too small.
_WIDEST = 2560


@triton.jit
def _places(N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, PIECE: tl.constexpr):
    """Features [parts, features] of piece `N`, and which of them there are."""
    place_k = N * PIECE + tl.arange(0, PIECE)
    place_gk = tl.arange(0, PARTS)[:, None] * PART + place_k[None, :]
    return place_gk, (place_k < PART)[None, :] & (place_gk < WIDTH)


@triton.jit
def _weights(weight_ptr, place_n, inside_n, place_gk, inside_gk, WIDTH: tl.constexpr):
    """Weights [parts, outputs, features]."""
    offset_gnk = place_n.to(tl.int64)[None, :, None] * WIDTH + place_gk[:, None, :]
    tile_gnk = inside_gk[:, None, :] & inside_n[None, :, None]
    return tl.load(weight_ptr + offset_gnk, mask=tile_gnk, other=0.0, eviction_policy="evict_first")


@triton.jit
def row_product_kernel(
    x_ptr, stream_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, outputs, eps, WIDTH: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    PART: tl.constexpr, PIECE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each of `PARTS` has `PART` features, which are multiplied in pieces of `PIECE`. `GATE` as in `product_kernel`.

    Norm and weights are asked for before the wait, and all rows before the first is used: so the rows are waited for
    once, not once a piece. With a norm the next kernel may start before this one waits (decision 0714).
    """
    if EARLY and NORM:
        let_next_start()
    program = tl.program_id(0)
    place_n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = place_n < outputs
    place_r = tl.arange(0, BLOCK_R)
    upper_ptr = weight_ptr + outputs * WIDTH
    pieces: tl.constexpr = (PART + PIECE - 1) // PIECE
    weights, up_weights, norms = (), (), ()
    for piece in tl.static_range(pieces):
        place_gk, inside_gk = _places(piece, WIDTH, PARTS, PART, PIECE)
        weights += (_weights(weight_ptr, place_n, inside_n, place_gk, inside_gk, WIDTH),)  # type: ignore[assignment]
        if GATE >= 0:
            up_weights += (_weights(upper_ptr, place_n, inside_n, place_gk, inside_gk, WIDTH),)  # type: ignore[assignment]
        if NORM:
            # As the rows lie, so that nothing has to move between threads.
            place_gkr, inside_gkr = place_gk[:, :, None] + place_r * 0, inside_gk[:, :, None] & (place_r >= 0)
            norms += (tl.load(norm_ptr + place_gkr, mask=inside_gkr, other=0.0),)  # type: ignore[assignment]
    if EARLY:
        wait_for_previous()
        if not NORM:
            let_next_start()
    xs, streams = (), ()
    for piece in tl.static_range(pieces):
        place_gk, inside_gk = _places(piece, WIDTH, PARTS, PART, PIECE)
        offset_gkr = place_r[None, None, :] * WIDTH + place_gk[:, :, None]
        tile_gkr = inside_gk[:, :, None] & (place_r < rows)[None, None, :]
        xs += (tl.load(x_ptr + offset_gkr, mask=tile_gkr, other=0.0),)  # type: ignore[assignment]
        if ADD:
            streams += (tl.load(stream_ptr + offset_gkr, mask=tile_gkr, other=0.0),)  # type: ignore[assignment]
    square_gkr = tl.zeros([PARTS, PIECE, BLOCK_R], tl.float32)
    inputs = ()
    for piece in tl.static_range(pieces):
        x_gkr = xs[piece]  # type: ignore[var-annotated]
        if ADD:
            # Rounded to the stream's type before it is normed, as it is when the addition stands alone.
            x_gkr = (x_gkr.to(tl.float32) + streams[piece].to(tl.float32)).to(streams[piece].dtype)
            place_gk, inside_gk = _places(piece, WIDTH, PARTS, PART, PIECE)
            mine_gkr = inside_gk[:, :, None] & (place_r < rows)[None, None, :] & (program == 0)
            tl.store(sum_ptr + place_r[None, None, :] * WIDTH + place_gk[:, :, None], x_gkr, mask=mine_gkr)
        if NORM:
            wide_gkr = x_gkr.to(tl.float32)  # type: ignore[var-annotated]
            square_gkr += wide_gkr * wide_gkr
            x_gkr = (wide_gkr * norms[piece].to(tl.float32)).to(x_gkr.dtype)
        if EARLY and (ADD or NORM):
            x_gkr = pinned(x_gkr)
        inputs += (x_gkr,)  # type: ignore[assignment]
    result_gnr = tl.zeros([PARTS, BLOCK_N, BLOCK_R], tl.float32)
    up_gnr = tl.zeros([PARTS, BLOCK_N, BLOCK_R], tl.float32)
    for piece in tl.static_range(pieces):
        result_gnr = tl.dot(weights[piece], inputs[piece], result_gnr, input_precision="ieee")
        if GATE >= 0:
            up_gnr = tl.dot(up_weights[piece], inputs[piece], up_gnr, input_precision="ieee")
    result_nr = tl.sum(result_gnr, axis=0)
    if NORM:
        scale_r = tl.rsqrt(tl.sum(tl.sum(square_gkr, axis=1), axis=0) / WIDTH + eps)
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
    rounded_nr = result_nr.to(weight_ptr.dtype.element_ty)
    out_nr = out_ptr + place_r[None, :] * outputs + place_n[:, None]
    tl.store(out_nr, rounded_nr.to(out_ptr.dtype.element_ty), mask=inside_n[:, None] & (place_r < rows)[None, :])


def parts_of(width: int, *, gated: bool = False) -> tuple[int, int, int]:
    """Parts that share the input features, one a warp; features of a part, and of its pieces: those that leave the
    fewest lanes idle, of equals the largest."""
    # Of many features few warps would ask for rows in several turns. Of two weights two warps ask for enough: 2.7 us
    # for 576 features and 1,536 outputs, where four take 3.7.
    parts = 8 if width > 1024 else 2 if gated else 4
    part = triton.cdiv(width, parts * 16) * 16
    return parts, part, min((128, 64, 32), key=lambda piece: triton.cdiv(part, piece) * piece)


def fits(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether these kernels are for such a product: few rows, a weight whose reading takes no longer than a launch, and
    sums that tensor cores can make."""
    small = weight_OI.shape[1] <= _WIDEST and weight_OI.numel() <= 1 << 21
    return 1 < rows <= MOST_ROWS and small and weight_OI.dtype == torch.bfloat16


def fits_head(rows: int, weight_OI: torch.Tensor) -> bool:
    """Whether they are for the product with a head: it is read as a stream, program after program."""
    few = 1 < rows <= MOST_ROWS and weight_OI.dtype == torch.bfloat16
    return few and weight_OI.shape[1] <= _WIDEST_HEAD and len(weight_OI) > _LEAST_HEAD


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
    """As `product.product`, of products that `fits` or `fits_head`. What is multiplied is rounded to the weight's type,
    as it is after a norm that stands alone, but the norm's factor for the whole row comes after the sums."""
    rows, width = x_RI.shape
    outputs = len(weight_OI) // (1 if activation is None else 2)
    assert x_RI.is_contiguous()
    assert weight_OI.is_contiguous()
    assert stream_RI is None or stream_RI.is_contiguous()
    out_RO = torch.empty(rows, outputs, dtype=out_dtype or weight_OI.dtype, device=x_RI.device)
    sum_RI = x_RI if stream_RI is None else torch.empty_like(x_RI)
    parts, part, piece = parts_of(width, gated=activation is not None)
    block_n = _HEADS_OUTPUTS if outputs > _LEAST_HEAD else _OUTPUTS
    row_product_kernel[(triton.cdiv(outputs, block_n),)](
        x_RI, x_RI if stream_RI is None else stream_RI, x_RI if norm_I is None else norm_I, weight_OI,
        x_RI if bias_O is None else bias_O, out_RO, sum_RI, rows, outputs, eps, WIDTH=width,
        ADD=stream_RI is not None, NORM=norm_I is not None, GATE=-1 if activation is None else KINDS[activation],
        BIAS=bias_O is not None, PARTS=parts, PART=part, PIECE=piece, BLOCK_N=block_n,
        BLOCK_R=8 if rows <= 8 else 16, EARLY=early_start, num_warps=parts, **early.launch_options(early_start),
    )  # fmt: skip
    return out_RO, sum_RI
