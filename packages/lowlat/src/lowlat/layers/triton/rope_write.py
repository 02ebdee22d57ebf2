"""QK-norm, rotary positions, and the write of keys and values to their slots, in one pass over a packed projection.

Legend of shape suffixes: R rows, L layers, N query heads, K key-value heads, Y = N + 2K heads of the packed projection,
D head dimension, S KV slots, P positions.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous


_FEW_ROWS = 16


@triton.jit
def rope_write_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, eps,
    layer_slots, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORM: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Y: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One program: `BLOCK_Y` heads of one row, all of them queries, keys or values. Rows are those of `LAYERS` layers
    in turn, whose caches and norms of keys lie one behind the other."""
    if EARLY and not LATE:
        let_next_start()
    if EARLY:
        wait_for_previous()
    if EARLY and LATE:
        let_next_start()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_Y
    each = tl.arange(0, BLOCK_Y)[:, None] * DIM
    place = tl.arange(0, BLOCK_D)[None, :]
    inside = (place < DIM) & (each >= 0)
    source = qkv_ptr + (row * (QUERY_HEADS + 2 * KV_HEADS) + head) * DIM + each
    x = tl.load(source + place, mask=inside, other=0.0)
    if head >= QUERY_HEADS + KV_HEADS:
        slot = tl.load(slots_ptr + row // LAYERS) + row % LAYERS * layer_slots
        tl.store(values_ptr + (slot * KV_HEADS + head - QUERY_HEADS - KV_HEADS) * DIM + each + place, x, mask=inside)
    else:
        # The other half of the head, which the rotation mixes in.
        other = (place + DIM // 2) % DIM
        wide = x.to(tl.float32)
        swapped = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            norm_ptr = query_norm_ptr if head < QUERY_HEADS else key_norm_ptr + row % LAYERS * DIM
            inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
            wide = wide * inverse * tl.load(norm_ptr + place, mask=place < DIM, other=0.0).to(tl.float32)
            swapped = swapped * inverse * tl.load(norm_ptr + other, mask=place < DIM, other=0.0).to(tl.float32)
        position = tl.load(positions_ptr + row // LAYERS)
        cos = tl.load(cos_ptr + position * DIM + place, mask=place < DIM, other=0.0)
        sin = tl.load(sin_ptr + position * DIM + place, mask=place < DIM, other=0.0)
        turned = (wide * cos + swapped * sin).to(x.dtype)
        if head < QUERY_HEADS:
            tl.store(q_ptr + (row * QUERY_HEADS + head) * DIM + each + place, turned, mask=inside)
        else:
            slot = tl.load(slots_ptr + row // LAYERS) + row % LAYERS * layer_slots
            tl.store(keys_ptr + (slot * KV_HEADS + head - QUERY_HEADS) * DIM + each + place, turned, mask=inside)


def rope_write(
    qkv_RYD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    positions_R: torch.Tensor,
    write_slots_R: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """As `DeviceOps.rope_write`; positions and slots are int64, the tables float32, everything contiguous."""
    return _launch(qkv_RYD, keys_SKD[None], values_SKD[None], positions_R, write_slots_R, tables, norms, early_start)


def write_layers(
    kv_RLYD: torch.Tensor,
    keys_LSKD: torch.Tensor,
    values_LSKD: torch.Tensor,
    positions_R: torch.Tensor,
    write_slots_R: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, float],
    *,
    early_start: bool = False,
) -> None:
    """As `DeviceOps.write_layers`, in one launch."""
    norms_LD, eps = norms
    assert norms_LD.is_contiguous()
    where = (positions_R, write_slots_R, tables, (norms_LD, norms_LD, eps))
    _launch(kv_RLYD.flatten(0, 1), keys_LSKD, values_LSKD, *where, early_start)


def _launch(
    qkv_RYD: torch.Tensor,
    keys_LSKD: torch.Tensor,
    values_LSKD: torch.Tensor,
    positions_R: torch.Tensor,
    write_slots_R: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    early_start: bool,
) -> torch.Tensor:
    rows, heads, dim = qkv_RYD.shape
    layers, slots, kv_heads, _ = keys_LSKD.shape
    query_heads = heads - 2 * kv_heads
    assert qkv_RYD.is_contiguous()
    assert keys_LSKD.is_contiguous()
    assert values_LSKD.is_contiguous()
    q_RND = qkv_RYD.new_empty(rows, query_heads, dim)
    query_norm_D, key_norm_D, eps = norms if norms is not None else (q_RND, q_RND, 0.0)
    block = triton.next_power_of_2(dim)
    # Few rows want many small programs, many rows few large ones; none has heads of two kinds.
    common = math.gcd(query_heads, kv_heads)
    block_y = 1 if rows <= _FEW_ROWS else min(8, common & -common)
    rope_write_kernel[(rows, heads // block_y)](
        qkv_RYD, q_RND, keys_LSKD, values_LSKD, positions_R, write_slots_R, *tables, query_norm_D, key_norm_D, eps,
        slots if layers > 1 else 0, QUERY_HEADS=query_heads, KV_HEADS=kv_heads, DIM=dim, NORM=norms is not None,
        LAYERS=layers, BLOCK_D=block, BLOCK_Y=block_y, num_warps=max(1, block_y // 2), EARLY=early_start,
        LATE=rows > 1, **early.launch_options(early_start),
    )  # fmt: skip
    return q_RND
