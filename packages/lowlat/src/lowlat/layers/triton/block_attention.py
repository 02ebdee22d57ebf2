"""Attention of a draft's blocks in training: each sees the tokens before its anchor, in a window, and itself.

Masks over whole sequences would be mostly zeros: a program here reads the window of one block alone.

Legend of shape suffixes: S sequences, T tokens of each, A blocks of each, Q = S * A blocks, B rows of a block, K
key-value heads, G query heads of each, N = K * G query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TOKENS = 64
"""Tokens that a program reads at a time."""


@triton.jit
def _rows(block, head, B: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Offsets [ROWS, D] of a block's query rows of one key-value head, those [ROWS] of their numbers, and which are."""
    row = tl.arange(0, ROWS)
    number = (block * B + row // G) * (K * G) + head * G + row % G
    return number[:, None] * D + tl.arange(0, D)[None, :], number, row < B * G


@triton.jit
def forward_kernel(
    q_ptr, keys_ptr, values_ptr, own_keys_ptr, own_values_ptr, anchors_ptr, begins_ptr, out_ptr, sums_ptr, tokens,
    window, scale, A, B: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = block // A
    anchor = tl.load(anchors_ptr + block).to(tl.int32)
    begin = tl.maximum(tl.load(begins_ptr + sequence).to(tl.int32), anchor - window)
    at, number, real = _rows(block, head, B, G, K, D, ROWS)
    dim, place, own = tl.arange(0, D), tl.arange(0, TOKENS), tl.arange(0, OWN)
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)
    mine = ((block * B + own) * K + head)[:, None] * D + dim[None, :]
    is_own = own < B
    own_k = tl.load(own_keys_ptr + mine, mask=is_own[:, None], other=0.0)
    own_v = tl.load(own_values_ptr + mine, mask=is_own[:, None], other=0.0)
    of_own = tl.where(is_own[None, :], tl.dot(q, tl.trans(own_k)) * scale, float("-inf"))
    best = tl.max(of_own, axis=1)
    own_weights = tl.exp(of_own - best[:, None])
    total = tl.sum(own_weights, axis=1)
    mixed = tl.dot(own_weights.to(own_v.dtype), own_v)
    first = (sequence * tokens * K + head) * D
    for start in range(begin, anchor, TOKENS):
        seen = start + place < anchor
        there = first + (start + place)[:, None] * (K * D) + dim[None, :]
        k = tl.load(keys_ptr + there, mask=seen[:, None], other=0.0)
        v = tl.load(values_ptr + there, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(best - higher)
        total = total * faded + tl.sum(weights, axis=1)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v)
        best = higher
    tl.store(out_ptr + at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(sums_ptr + number, best + tl.log(total), mask=real)


@triton.jit
def block_slope_kernel(
    q_ptr, keys_ptr, values_ptr, own_keys_ptr, own_values_ptr, anchors_ptr, begins_ptr, out_ptr, sums_ptr, slope_ptr,
    meant_ptr, q_slope_ptr, own_keys_slope_ptr, own_values_slope_ptr, tokens, window, scale, A,
    B: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Slopes of a block's queries and of its own keys and values; `meant`: sum of slope times result of each row."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = block // A
    anchor = tl.load(anchors_ptr + block).to(tl.int32)
    begin = tl.maximum(tl.load(begins_ptr + sequence).to(tl.int32), anchor - window)
    at, number, real = _rows(block, head, B, G, K, D, ROWS)
    dim, place, own = tl.arange(0, D), tl.arange(0, TOKENS), tl.arange(0, OWN)
    q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)
    slope = tl.load(slope_ptr + at, mask=real[:, None], other=0.0)
    out = tl.load(out_ptr + at, mask=real[:, None], other=0.0)
    meant = tl.sum(slope.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(meant_ptr + number, meant, mask=real)
    sums = tl.load(sums_ptr + number, mask=real, other=float("inf"))
    mine = ((block * B + own) * K + head)[:, None] * D + dim[None, :]
    is_own = own < B
    own_k = tl.load(own_keys_ptr + mine, mask=is_own[:, None], other=0.0)
    own_v = tl.load(own_values_ptr + mine, mask=is_own[:, None], other=0.0)
    own_weights = tl.exp(tl.dot(q, tl.trans(own_k)) * scale - sums[:, None])
    own_weights = tl.where(is_own[None, :], own_weights, 0.0)
    own_moved = (own_weights * (tl.dot(slope, tl.trans(own_v)) - meant[:, None]) * scale).to(own_k.dtype)
    q_slope = tl.dot(own_moved, own_k)
    k_slope, v_slope = tl.dot(tl.trans(own_moved), q), tl.dot(tl.trans(own_weights.to(slope.dtype)), slope)
    tl.store(own_keys_slope_ptr + mine, k_slope.to(own_keys_slope_ptr.dtype.element_ty), mask=is_own[:, None])
    tl.store(own_values_slope_ptr + mine, v_slope.to(own_values_slope_ptr.dtype.element_ty), mask=is_own[:, None])
    first = (sequence * tokens * K + head) * D
    for start in range(begin, anchor, TOKENS):
        seen = start + place < anchor
        there = first + (start + place)[:, None] * (K * D) + dim[None, :]
        k = tl.load(keys_ptr + there, mask=seen[:, None], other=0.0)
        v = tl.load(values_ptr + there, mask=seen[:, None], other=0.0)
        weights = tl.exp(tl.dot(q, tl.trans(k)) * scale - sums[:, None])
        weights = tl.where(seen[None, :], weights, 0.0)
        moved = (weights * (tl.dot(slope, tl.trans(v)) - meant[:, None]) * scale).to(k.dtype)
        q_slope += tl.dot(moved, k)
    tl.store(q_slope_ptr + at, q_slope.to(q_slope_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def context_slope_kernel(
    q_ptr, keys_ptr, values_ptr, anchors_ptr, begins_ptr, sums_ptr, slope_ptr, meant_ptr, keys_slope_ptr,
    values_slope_ptr, tokens, window, scale, A, B: tl.constexpr, K: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Slopes of some tokens' keys and values, from all blocks that see them."""
    sequence, head, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TOKENS
    dim, place = tl.arange(0, D), start + tl.arange(0, TOKENS)
    inside = (place < tokens)[:, None]
    there = (sequence * tokens * K + head) * D + place[:, None] * (K * D) + dim[None, :]
    k = tl.load(keys_ptr + there, mask=inside, other=0.0)
    v = tl.load(values_ptr + there, mask=inside, other=0.0)
    first = tl.load(begins_ptr + sequence).to(tl.int32)
    k_slope, v_slope = tl.zeros([TOKENS, D], tl.float32), tl.zeros([TOKENS, D], tl.float32)
    for index in range(A):
        block = sequence * A + index
        anchor = tl.load(anchors_ptr + block).to(tl.int32)
        begin = tl.maximum(first, anchor - window)
        if (start < anchor) & (start + TOKENS > begin):
            at, number, real = _rows(block, head, B, G, K, D, ROWS)
            q = tl.load(q_ptr + at, mask=real[:, None], other=0.0)
            slope = tl.load(slope_ptr + at, mask=real[:, None], other=0.0)
            sums = tl.load(sums_ptr + number, mask=real, other=float("inf"))
            meant = tl.load(meant_ptr + number, mask=real, other=0.0)
            seen = (place >= begin) & (place < anchor)
            weights = tl.exp(tl.dot(k, tl.trans(q)) * scale - sums[None, :])
            weights = tl.where(seen[:, None], weights, 0.0)
            v_slope += tl.dot(weights.to(slope.dtype), slope)
            moved = weights * (tl.dot(v, tl.trans(slope)) - meant[None, :]) * scale
            k_slope += tl.dot(moved.to(q.dtype), q)
    tl.store(keys_slope_ptr + there, k_slope.to(keys_slope_ptr.dtype.element_ty), mask=inside)
    tl.store(values_slope_ptr + there, v_slope.to(values_slope_ptr.dtype.element_ty), mask=inside)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_QBND: torch.Tensor,
        keys_STKD: torch.Tensor,
        values_STKD: torch.Tensor,
        own_keys_QBKD: torch.Tensor,
        own_values_QBKD: torch.Tensor,
        anchors_SA: torch.Tensor,
        begins_S: torch.Tensor,
        window: int,
    ) -> torch.Tensor:
        given = q_QBND, keys_STKD, values_STKD, own_keys_QBKD, own_values_QBKD, anchors_SA, begins_S
        parts = [part.detach().contiguous() for part in given]
        blocks, rows, heads, dim = q_QBND.shape
        tokens, kv_heads = keys_STKD.shape[1:3]
        sizes = {"A": anchors_SA.shape[1], "B": rows, "K": kv_heads, "G": heads // kv_heads, "D": dim}
        ctx.sizes = sizes | {"ROWS": max(16, triton.next_power_of_2(rows * heads // kv_heads)), "TOKENS": _TOKENS}
        ctx.own = max(16, triton.next_power_of_2(rows))
        ctx.numbers = tokens, window or tokens, dim**-0.5
        out_QBND = torch.empty_like(parts[0])
        sums_QBN = torch.empty(blocks, rows, heads, device=q_QBND.device)
        forward_kernel[(blocks, kv_heads)](
            *parts, out_QBND, sums_QBN, *ctx.numbers, **ctx.sizes, OWN=ctx.own, num_warps=4
        )  # fmt: skip
        ctx.save_for_backward(*parts, out_QBND, sums_QBN)
        return out_QBND

    @staticmethod
    def backward(ctx: Any, slope_QBND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_QBND, keys, values, own_keys, own_values, anchors_SA, begins_S, _, sums_QBN = ctx.saved_tensors
        slope_QBND = slope_QBND.contiguous()
        slopes = [torch.empty_like(part) for part in (q_QBND, keys, values, own_keys, own_values)]
        meant_QBN = torch.empty_like(sums_QBN)
        block_slope_kernel[(len(q_QBND), keys.shape[2])](
            *ctx.saved_tensors, slope_QBND, meant_QBN, slopes[0], slopes[3], slopes[4], *ctx.numbers, **ctx.sizes,
            OWN=ctx.own, num_warps=4,
        )  # fmt: skip
        context_slope_kernel[(len(keys), keys.shape[2], triton.cdiv(keys.shape[1], _TOKENS))](
            q_QBND, keys, values, anchors_SA, begins_S, sums_QBN, slope_QBND, meant_QBN, slopes[1], slopes[2],
            *ctx.numbers, **ctx.sizes, num_warps=4,
        )  # fmt: skip
        return (*slopes, None, None, None)


def block_attention(
    q_QBND: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor],
    anchors_SA: torch.Tensor,
    begins_S: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """[Q, B, N, D]. `context`: keys and values [S, T, K, D]; `own`: those of the blocks' rows [Q, B, K, D]; tokens from
    `begins_S` on are seen, the last `window` before the anchor (0: all). All parts are of one type."""
    result: torch.Tensor = _BlockAttention.apply(q_QBND, *context, *own, anchors_SA, begins_S, window)  # type: ignore[no-untyped-call]
    return result
