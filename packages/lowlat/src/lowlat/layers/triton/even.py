"""Attention of many requests of one length, a query row each: what writes a draft's training text.

Legend of shape suffixes: B requests, S KV slots, K key-value heads, G query heads a key-value head, N = K * G query
heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64
_LEAST_ROWS = 16
"""Rows of the smallest matrix product."""


@triton.jit
def even_kernel(
    q_ptr, keys_ptr, values_ptr, length_ptr, out_ptr, q_stride, room, scale, K: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(length_ptr).to(tl.int32)
    dim, row, place = tl.arange(0, D), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mine = (head * G + row)[:, None] * D + dim[None, :]
    real = (row < G)[:, None]
    q = tl.load(q_ptr + request * q_stride + mine, mask=real, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    first = (request * room * K + head) * D
    for start in range(0, length, BLOCK):
        seen = start + place < length
        at = first + (start + place)[:, None] * (K * D) + dim[None, :]
        k = tl.load(keys_ptr + at, mask=seen[:, None], other=0.0)
        v = tl.load(values_ptr + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(best - higher)
        total = total * faded + tl.sum(weights, axis=1)
        mixed = mixed * faded[:, None] + tl.dot(weights.to(v.dtype), v)
        best = higher
    mixed = mixed / total[:, None]
    tl.store(out_ptr + request * (K * G * D) + mine, mixed.to(out_ptr.dtype.element_ty), mask=real)


def even_attention(
    q_BND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    length_1: torch.Tensor,
    room: int,
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the first `length_1` slots of each request's `room`: [B, N, D]."""
    requests, heads, dim = q_BND.shape
    kv_heads = keys_SKD.shape[1]
    assert dim == triton.next_power_of_2(dim)
    assert q_BND.stride()[1:] == (dim, 1)
    assert keys_SKD.is_contiguous()
    assert values_SKD.is_contiguous()
    out_BND = torch.empty(requests, heads, dim, dtype=q_BND.dtype, device=q_BND.device)
    group = heads // kv_heads
    even_kernel[(requests, kv_heads)](
        q_BND, keys_SKD, values_SKD, length_1, out_BND, q_BND.stride(0), room, scale, K=kv_heads, G=group, D=dim,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), BLOCK=_BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_BND
