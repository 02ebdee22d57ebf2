"""Causal attention over paged keys and values: decode and prefill over cached prefixes, by one kernel and a combine.

Work is cut into items: (segment, block of query rows, split of the tokens seen, key-value head). How many splits a
segment has follows from its own rows and length alone, so a row's result does not depend on its neighbours. Lengths are
device data, the grid is fixed, and each program finds its items itself: one capture in a graph serves every length.

Items of a segment with one split write the result; the others write partial results with the logarithm of their sum,
which `combine_kernel` or `combine_rows_kernel` joins in the order of splits: no atomics, the same bits every time.

Rows of items (`ItemSegments`) see a prefix and their own item. A block of rows leaves out the tokens between the prefix
and the first item that it has rows of, so tokens are counted without them; items beside each other in a block are told
apart by a mask of the block's own tokens.

Legend of shape suffixes: R rows, N query heads, K key-value heads, G = N / K, D head dimension, S KV slots, B segments.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import RowSegments
from lowlat.layers.triton import early
from lowlat.layers.triton.attention_shape import AttentionShape, lanes_of_warps, register_limit
from lowlat.layers.triton.attention_tiles import look, look_lean

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

# Fewest tokens of a split: below this, more programs cost more than they read.
MIN_CHUNK = 64
# Most splits of a segment: what the combine kernel holds at once.
MAX_SPLITS = 64


@triton.jit
def _splits(
    rows, length, WINDOW: tl.constexpr, MOST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):  # fmt: skip
    """Query blocks, first token seen, tokens of a split, splits; for one segment, or for a vector of them."""
    blocks = tl.cdiv(rows, BLOCK_Q)
    if WINDOW > 0:
        begin = tl.maximum(length - rows - WINDOW + 1, 0)
    else:
        begin = length * 0
    span = length - begin
    share = tl.maximum(MOST // tl.maximum(blocks, 1), 1)
    chunk = tl.maximum(tl.cdiv(span, share * BLOCK_L) * BLOCK_L, MIN_CHUNK)
    splits = tl.maximum(tl.cdiv(span, chunk), 1)
    return blocks, begin, chunk, splits


@triton.jit(do_not_specialize=["segments", "table_stride"])
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, slots_ptr, first_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr,
    partial_ptr, sums_ptr, prefix_ptr, begins_ptr, segments, table_stride, block_base, scale, WINDOW: tl.constexpr,
    MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SINKS: tl.constexpr, ITEMS: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_CHUNK: tl.constexpr, DRAFT: tl.constexpr, SIFTED: tl.constexpr, LEAN: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program takes items `program_id`, `program_id` + programs, ...; `scale` includes log2(e).

    With `DRAFT` segments are blocks of a draft, see `DeviceStep.block_base`; the window is one more there, so that it
    begins where that of a row after the context would.

    `BLOCK_M` rows of scores are `BLOCK_Q` query rows times `GROUP` heads, and what fills the power of two. `SINGLE`:
    segments have one block of rows, and there is a program for each split that one might have. `LEAN` and `STAGES`: see
    `AttentionShape`.
    """
    # Kernels of steps of several rows come one by one: where many wait on a processor, new ones crowd on the others.
    if EARLY and BLOCK_Q == 1:
        let_next_start()
    if EARLY:
        wait_for_previous()
    if EARLY and BLOCK_Q > 1:
        let_next_start()
    if SINGLE:
        segment = tl.program_id(0) // (KV_HEADS * MOST)
        local = tl.program_id(0) // KV_HEADS % MOST
        length = tl.load(lengths_ptr + segment)
        first = tl.load(first_ptr + segment)
        slot = tl.load(slots_ptr + segment).to(tl.int64)
        if BLOCK_Q == 1:
            rows = length * 0 + 1
        else:
            rows = tl.load(rows_ptr + segment)
        _blocks, begin, chunk, splits = _splits(rows, length, WINDOW, MOST, BLOCK_Q, BLOCK_L, MIN_CHUNK)
        total = tl.program_id(0) + (local < splits).to(tl.int32)
    else:
        every = tl.arange(0, BLOCK_B)
        real = every < segments
        rows_B = tl.load(rows_ptr + every, mask=real, other=0)
        length_B = tl.load(lengths_ptr + every, mask=real, other=0)
        blocks_B, _begin_B, _chunk_B, splits_B = _splits(rows_B, length_B, WINDOW, MOST, BLOCK_Q, BLOCK_L, MIN_CHUNK)
        items_B = blocks_B * splits_B
        ends_B = tl.cumsum(items_B, axis=0)
        total = tl.sum(items_B, axis=0) * KV_HEADS

    place_m = tl.arange(0, BLOCK_M)
    token_m = place_m // GROUP
    place_d = tl.arange(0, BLOCK_D)
    place_l = tl.arange(0, BLOCK_L)
    dim_ok = place_d < DIM

    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        if not SINGLE:
            work = item // KV_HEADS
            segment = tl.sum((ends_B <= work).to(tl.int32), axis=0)
            local = work - tl.sum(tl.where(ends_B <= work, items_B, 0), axis=0)
            rows = tl.load(rows_ptr + segment)
            length = tl.load(lengths_ptr + segment)
            first = tl.load(first_ptr + segment)
            slot = tl.load(slots_ptr + segment).to(tl.int64)
            _blocks, begin, chunk, splits = _splits(rows, length, WINDOW, MOST, BLOCK_Q, BLOCK_L, MIN_CHUNK)
        block = local // splits
        split = local % splits

        row_m = block * BLOCK_Q + token_m
        row_ok = (token_m < BLOCK_Q) & (row_m < rows)
        position_m = length - rows + row_m
        head_m = kv_head * GROUP + place_m % GROUP
        offset_m = ((first + row_m).to(tl.int64) * (KV_HEADS * GROUP) + head_m) * DIM
        tile = row_ok[:, None] & dim_ok[None, :]
        q = tl.load(q_ptr + offset_m[:, None] + place_d[None, :], mask=tile, other=0.0)

        low = begin + split * chunk
        if DRAFT:
            high = tl.minimum(low + chunk, length)
        else:
            high = tl.minimum(low + chunk, length - rows + tl.minimum((block + 1) * BLOCK_Q, rows))
        begin_m, distance_m, prefix = position_m, position_m, 0
        if ITEMS:
            prefix = tl.load(prefix_ptr + segment)
            begin_m = tl.load(begins_ptr + first + row_m, mask=row_ok, other=2147483647)
            # Tokens between the prefix and the first item of these rows; to a row, its item begins behind the prefix.
            hole = tl.maximum(tl.min(begin_m, axis=0) - prefix, 0)
            high = tl.minimum(low + chunk, length - rows + tl.minimum((block + 1) * BLOCK_Q, rows) - hole)
            distance_m = position_m - begin_m + prefix
            if WINDOW > 0:
                low = tl.maximum(low, tl.min(tl.where(row_ok, distance_m, 2147483647), axis=0) - WINDOW + 1)
        elif WINDOW > 0 and not DRAFT:
            # A later block of rows does not see the tokens that left the window before it.
            low = tl.maximum(low, length - rows + block * BLOCK_Q - WINDOW + 1)
        best_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_m = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        pages_ptr = table_ptr + slot * table_stride
        if SIFTED:
            # Tokens that every row of the block sees, in whole tiles, need no mask.
            clear = length - rows + block * BLOCK_Q + 1
            if ITEMS:
                clear = tl.minimum(clear, prefix)
            clear = low + tl.maximum(tl.minimum(clear, high) - low, 0) // BLOCK_L * BLOCK_L
            for start in range(low, clear, BLOCK_L):
                seen_l = start + place_l
                slot_l = tl.load(pages_ptr + seen_l // PAGE).to(tl.int64) * PAGE + seen_l % PAGE
                best_m, sum_m, mixed = look(
                    slot_l, seen_l, place_l >= 0, q, best_m, sum_m, mixed, position_m, begin_m, distance_m, prefix,
                    keys_ptr, values_ptr, kv_head, place_d, scale,
                    False, False, False, 0, KV_HEADS, DIM, BLOCK_D,
                )  # fmt: skip
            low = clear
        if LEAN > 0:  # noqa: SIM102 (a constant, without which there is no branch)
            if high - low >= LEAN * BLOCK_L:
                low, best_m, sum_m, mixed = look_lean(
                    low, high, pages_ptr, q, best_m, sum_m, mixed, keys_ptr, values_ptr, kv_head, scale,
                    KV_HEADS, DIM, PAGE, BLOCK_L, BLOCK_D,
                )  # fmt: skip
        for start in tl.range(low, high, BLOCK_L, num_stages=STAGES):
            seen_l = start + place_l
            seen_ok = seen_l < high
            if ITEMS:
                seen_l = tl.where(seen_l < prefix, seen_l, seen_l + hole)
            paged_ok = seen_ok
            if DRAFT:
                paged_ok = seen_l < tl.minimum(high, length - rows)
            page_l = tl.load(pages_ptr + seen_l // PAGE, mask=paged_ok, other=0).to(tl.int64)
            slot_l = page_l * PAGE + seen_l % PAGE
            if DRAFT:
                slot_l = tl.where(paged_ok, slot_l, (block_base + first + seen_l - (length - rows)).to(tl.int64))
            best_m, sum_m, mixed = look(
                slot_l, seen_l, seen_ok, q, best_m, sum_m, mixed, position_m, begin_m, distance_m, prefix,
                keys_ptr, values_ptr, kv_head, place_d, scale,
                True, ITEMS, DRAFT, WINDOW, KV_HEADS, DIM, BLOCK_D,
            )  # fmt: skip

        if splits == 1:
            if SINKS:
                sink_m = tl.load(sinks_ptr + head_m, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
                base_m = tl.maximum(best_m, sink_m)
                mixed = mixed * tl.exp2(best_m - base_m)[:, None]
                sum_m = sum_m * tl.exp2(best_m - base_m) + tl.exp2(sink_m - base_m)
            result = mixed / tl.where(sum_m == 0.0, 1.0, sum_m)[:, None]
            tl.store(out_ptr + offset_m[:, None] + place_d[None, :], result.to(q.dtype), mask=tile)
        else:
            part = ((segment * MOST + local) * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + place_m
            part_ok = (place_m < BLOCK_Q * GROUP)[:, None] & dim_ok[None, :]
            tl.store(partial_ptr + part[:, None] * DIM + place_d[None, :], mixed, mask=part_ok)
            tl.store(sums_ptr + part * 2, best_m, mask=place_m < BLOCK_Q * GROUP)
            tl.store(sums_ptr + part * 2 + 1, sum_m, mask=place_m < BLOCK_Q * GROUP)


@triton.jit
def combine_kernel(
    partial_ptr, sums_ptr, first_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr,
    WINDOW: tl.constexpr, MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_CHUNK: tl.constexpr, EARLY: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Segments of few rows. One program: one head of a row, all splits at once."""
    if EARLY and BLOCK_Q == 1:
        let_next_start()
    if EARLY:
        wait_for_previous()
    if EARLY and BLOCK_Q > 1:
        let_next_start()
    segment = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    rows = tl.load(rows_ptr + segment)
    length = tl.load(lengths_ptr + segment)
    _blocks, _begin, _chunk, splits = _splits(rows, length, WINDOW, MOST, BLOCK_Q, BLOCK_L, MIN_CHUNK)
    if (row < rows) & (splits > 1):
        place_s = tl.arange(0, BLOCK_S)
        place_d = tl.arange(0, BLOCK_D)
        split_ok = place_s < splits
        local_s = row // BLOCK_Q * splits + place_s
        part_s = ((segment * MOST + local_s) * KV_HEADS + head // GROUP).to(tl.int64) * BLOCK_M
        part_s += row % BLOCK_Q * GROUP + head % GROUP
        best_s = tl.load(sums_ptr + part_s * 2, mask=split_ok, other=float("-inf"))
        sum_s = tl.load(sums_ptr + part_s * 2 + 1, mask=split_ok, other=0.0)
        base = tl.max(best_s, axis=0)
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
            base = tl.maximum(base, sink)
        fade_s = tl.exp2(best_s - base)
        total = tl.sum(sum_s * fade_s, axis=0)
        if SINKS:
            total += tl.exp2(sink - base)
        tile = split_ok[:, None] & (place_d < DIM)[None, :]
        mixed = tl.load(partial_ptr + part_s[:, None] * DIM + place_d[None, :], mask=tile, other=0.0)
        result = tl.sum(mixed * fade_s[:, None], axis=0) / total
        offset = ((tl.load(first_ptr + segment) + row).to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
        tl.store(out_ptr + offset + place_d, result.to(out_ptr.dtype.element_ty), mask=place_d < DIM)


@triton.jit(do_not_specialize=["segments"])
def combine_rows_kernel(
    partial_ptr, sums_ptr, first_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr, segments,
    WINDOW: tl.constexpr, MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_CHUNK: tl.constexpr, EARLY: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Segments of many rows, which have few splits. One program: `BLOCK_N` heads of a row of the step, split after
    split."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    every = tl.arange(0, BLOCK_B)
    first_B = tl.load(first_ptr + every, mask=every < segments, other=0)
    rows_B = tl.load(rows_ptr + every, mask=every < segments, other=0)
    mine_B = (first_B <= tl.program_id(0)) & (tl.program_id(0) < first_B + rows_B)
    # A row of no segment counts as one beyond the first's.
    segment = tl.sum(tl.where(mine_B, every, 0), axis=0)
    row = tl.program_id(0) - tl.sum(tl.where(mine_B, first_B, 0), axis=0)
    rows = tl.where(tl.sum(mine_B.to(tl.int32), axis=0) > 0, tl.load(rows_ptr + segment), 0)
    length = tl.load(lengths_ptr + segment)
    _blocks, _begin, _chunk, splits = _splits(rows, length, WINDOW, MOST, BLOCK_Q, BLOCK_L, MIN_CHUNK)
    if (row < rows) & (splits > 1):
        head_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        place_d = tl.arange(0, BLOCK_D)
        head_ok = head_n < KV_HEADS * GROUP
        tile = head_ok[:, None] & (place_d < DIM)[None, :]
        local = row // BLOCK_Q * splits
        part_n = ((segment * MOST + local) * KV_HEADS + head_n // GROUP).to(tl.int64) * BLOCK_M
        part_n += row % BLOCK_Q * GROUP + head_n % GROUP
        base_n = tl.full([BLOCK_N], float("-inf"), tl.float32)
        total_n = tl.zeros([BLOCK_N], tl.float32)
        mixed = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if SINKS:
            base_n = tl.load(sinks_ptr + head_n, mask=head_ok, other=0.0).to(tl.float32) * 1.4426950408889634
            total_n += 1.0
        for _ in range(splits):
            best_n = tl.load(sums_ptr + part_n * 2, mask=head_ok, other=0.0)
            sum_n = tl.load(sums_ptr + part_n * 2 + 1, mask=head_ok, other=1.0)
            more = tl.load(partial_ptr + part_n[:, None] * DIM + place_d[None, :], mask=tile, other=0.0)
            next_n = tl.maximum(base_n, best_n)
            # Of a window, a row may have seen nothing in any split so far.
            level_n = tl.where(next_n == float("-inf"), 0.0, next_n)
            fade_n, grow_n = tl.exp2(base_n - level_n), tl.exp2(best_n - level_n)
            total_n = total_n * fade_n + sum_n * grow_n
            mixed = mixed * fade_n[:, None] + more * grow_n[:, None]
            base_n = next_n
            part_n += KV_HEADS * BLOCK_M
        place = (tl.program_id(0).to(tl.int64) * (KV_HEADS * GROUP) + head_n[:, None]) * DIM + place_d[None, :]
        tl.store(out_ptr + place, (mixed / total_n[:, None]).to(out_ptr.dtype.element_ty), mask=tile)


def attend(
    q_RND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    table_TP: torch.Tensor,
    page_size: int,
    segments: RowSegments,
    rule: AttentionRule,
    out_RND: torch.Tensor,
    *,
    programs: int,
    early_start: bool = False,
    block_base: int = -1,
    registers: int | None = None,
    shape: AttentionShape | None = None,
) -> None:
    """softmax(q k^T scale) v of the segments' rows, written to `out_RND`; other rows stay as they are.

    `programs`: programs that fill the device, and about as many splits as a lone segment gets. `block_base`: see
    `DeviceStep`. `registers`, `shape`: others than `register_limit` and `AttentionShape.of` these segments. All tensors
    contiguous; `out_RND` has the type of `q_RND`, float32 or bfloat16. Softmax and sums are float32 (Milakov and
    Gimelshein 2018).
    """
    total, heads, dim = q_RND.shape
    kv_heads = keys_SKD.shape[1]
    group = heads // kv_heads
    count = len(segments.slots_B)
    assert q_RND.is_contiguous()
    assert out_RND.is_contiguous()
    assert keys_SKD.is_contiguous()
    assert values_SKD.is_contiguous()
    size = q_RND.element_size()
    draft = block_base >= 0
    plain = not draft and not rule.window and segments.items is None
    lanes = lanes_of_warps()
    if shape is None:
        shape = AttentionShape.of(
            group, segments.most_rows, dim, size, segments=count, lanes=lanes, tight=segments.tight,
            page_size=page_size if plain else 0,
        )  # fmt: skip
    assert not shape.lean or (plain and segments.most_rows == 1 and shape.block_l % page_size == 0)
    if registers is None:
        registers = register_limit(segments, shape, dim, size, plain=plain, lanes=lanes)
    few = segments.most_rows == 1 or segments.tight
    single = few and segments.most_rows <= shape.block_q
    # Splits of many rows write and read more than those of one, so they fill the device half as full.
    many = segments.most_rows > shape.block_q
    most = min(MAX_SPLITS, max(1, -(-programs // (2 * kv_heads if many else kv_heads))))
    blocks = -(-segments.most_rows // shape.block_q)
    parts = count * most * kv_heads * shape.block_m
    partial = torch.empty(parts * dim, dtype=torch.float32, device=q_RND.device)
    sums = torch.empty(parts * 2, dtype=torch.float32, device=q_RND.device)
    scale = (1 / math.sqrt(dim) if rule.scale is None else rule.scale) * math.log2(math.e)
    sinks = q_RND if rule.sinks_N is None else rule.sinks_N
    block_d = max(16, triton.next_power_of_2(dim))
    common = {
        "KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "SINKS": rule.sinks_N is not None, "BLOCK_Q": shape.block_q,
        "BLOCK_M": shape.block_m, "BLOCK_L": shape.block_l, "BLOCK_D": block_d, "MIN_CHUNK": MIN_CHUNK,
        "WINDOW": rule.window + 1 if draft and rule.window else rule.window, "MOST": most, "EARLY": early_start,
        **early.launch_options(early_start),
    }  # fmt: skip
    limit = {"maxnreg": registers} if registers else {}
    where = (segments.first_B, segments.rows_B, segments.lengths_B)
    items = segments.items
    seen = where[:2] if items is None else (items.prefix_B, items.begins_R)
    block_b = max(16, triton.next_power_of_2(count))
    most_items = count * max(most, blocks) * kv_heads
    attend_kernel[(most_items if single else min(programs, most_items),)](
        q_RND, keys_SKD, values_SKD, table_TP, segments.slots_B, *where, sinks, out_RND, partial, sums, *seen,
        count, table_TP.stride(0), block_base, scale, **common, PAGE=page_size, ITEMS=items is not None, SINGLE=single,
        DRAFT=draft, SIFTED=many and not draft and not rule.window, LEAN=shape.lean,
        STAGES=shape.masked_stages,
        BLOCK_B=block_b, num_warps=shape.warps, num_stages=shape.stages, **limit,
    )  # fmt: skip
    if most > 1 and few:
        combine_kernel[(count, heads, segments.most_rows)](
            partial, sums, *where, sinks, out_RND, **common, BLOCK_S=triton.next_power_of_2(most), num_warps=4
        )
    elif most > 1:
        block_n = min(16, triton.next_power_of_2(heads))
        combine_rows_kernel[(total, triton.cdiv(heads, block_n))](
            partial, sums, *where, sinks, out_RND, count, **common, BLOCK_B=block_b, BLOCK_N=block_n, num_warps=4
        )
