"""Attention of a few new rows of each request, with what stands before it: QK-norm, rotation, the write to the cache.

For decode steps, whose kernels are small: what counts there is how often a kernel waits for memory. Rows
see two kinds of tokens. Those in the cache before the step are cut into splits, and a program asks for its keys and
values before it waits for the product that makes the rows. The rows' own keys and values come from that product, by a
program of their own, which also writes them to the cache: nobody reads them there in this step. A second launch joins
the parts.

What a program reads before it waits must be there by then: what earlier steps wrote to the cache, and what the step's
first kernel wrote. The look-up of the step's embeddings lets kernels start only after it has waited for both
(`rows.look_up`); they are read past the first level cache, which may hold older ones.

Legend of shape suffixes: R rows, N query heads, K key-value heads, Y = N + 2K heads of the packed projection, D head
dimension, S KV slots, T rows of the page table, P pages of a row, B segments.
"""

from __future__ import annotations

import math

import msgspec
import torch
import triton
import triton.language as tl

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceStep, RowSegments
from lowlat.layers.triton import early
from lowlat.layers.triton.attention import MAX_SPLITS, MIN_CHUNK
from lowlat.layers.triton.attention_shape import AttentionShape, lanes_of_warps
from lowlat.layers.triton.attention_tiles import fold, look, look_lean, tile_pages, tile_slots
from lowlat.layers.triton.pin import pinned

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

MOST_ROWS = 16
_MOST_SCORES = 64
"""Query rows times heads of a group that a program holds."""
_PARTS = 32
"""Parts that a program joins at once."""


@triton.jit
def _shares(before, WINDOW: tl.constexpr, MOST: tl.constexpr, BLOCK_L: tl.constexpr, MIN_CHUNK: tl.constexpr):
    """First token seen of `before` cached ones, tokens of a split, splits: by the own length alone."""
    if WINDOW > 0:
        begin = tl.maximum(before - WINDOW + 1, 0)
    else:
        begin = before * 0
    chunk = tl.maximum(tl.cdiv(before - begin, MOST * BLOCK_L) * BLOCK_L, MIN_CHUNK)
    return begin, chunk, tl.cdiv(before - begin, chunk)


@triton.jit
def _norm(norm_ptr, place, DIM: tl.constexpr):
    return tl.load(norm_ptr + place, mask=place < DIM, other=0.0).to(tl.float32)


@triton.jit
def _turned(x, swapped, cos, sin, norm, other_norm, eps, NORM: tl.constexpr, DIM: tl.constexpr,
            PIN: tl.constexpr):  # fmt: skip
    """Heads [X, D], normed and rotated, as `rope_write_kernel` has them. `swapped`: halves the other way."""
    wide, other = x.to(tl.float32), swapped.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / DIM + eps)[:, None]
        wide, other = wide * inverse * norm, other * inverse * other_norm
    result = (wide * cos + other * sin).to(x.dtype)
    if PIN:
        result = pinned(result)
    return result


@triton.jit(do_not_specialize=["table_stride"])
def row_attend_kernel(
    qkv_ptr, keys_ptr, values_ptr, table_ptr, slots_ptr, first_ptr, rows_ptr, lengths_ptr, places_ptr, cos_ptr, sin_ptr,
    query_norm_ptr, key_norm_ptr, partial_ptr, sums_ptr, table_stride, eps, scale, WINDOW: tl.constexpr,
    MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, DRAFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, MIN_CHUNK: tl.constexpr, LEAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program: the rows of a segment and a key-value head against a split of the cache, or against the rows' own keys
    and values. `scale` includes log2(e). With `DRAFT` rows see all rows of their segment, which nobody else will."""
    kv_head = tl.program_id(0) % KV_HEADS
    segment = tl.program_id(0) // KV_HEADS // (MOST + 1)
    # The rows' own come first: they take longest.
    part = tl.program_id(0) // KV_HEADS % (MOST + 1)
    length = tl.load(lengths_ptr + segment, cache_modifier=".cg")
    # The one row of a padding request has no tokens.
    rows = tl.minimum(tl.load(rows_ptr + segment, cache_modifier=".cg"), length)
    first = tl.load(first_ptr + segment, cache_modifier=".cg")
    slot = tl.load(slots_ptr + segment, cache_modifier=".cg").to(tl.int64)
    before = length - rows
    begin, chunk, splits = _shares(before, WINDOW, MOST, BLOCK_L, MIN_CHUNK)
    if part > splits:
        return

    place_m, place_d, place_l = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_L)
    other_d = (place_d + DIM // 2) % DIM
    dim_ok = place_d < DIM
    row_m = place_m // GROUP
    head_m = kv_head * GROUP + place_m % GROUP
    position_m = before + row_m
    tile = (row_m < rows)[:, None] & dim_ok
    angle_m = position_m[:, None] * DIM + place_d
    cos, sin = tl.load(cos_ptr + angle_m, mask=tile, other=0.0), tl.load(sin_ptr + angle_m, mask=tile, other=0.0)
    each = tl.arange(0, BLOCK_R)
    own_ok = (each < rows) & (part == 0)
    own = own_ok[:, None] & dim_ok
    angle_r = (before + each)[:, None] * DIM + place_d
    own_cos, own_sin = tl.load(cos_ptr + angle_r, mask=own, other=0.0), tl.load(sin_ptr + angle_r, mask=own, other=0.0)
    place_r = tl.load(places_ptr + first + each, mask=own_ok, other=0, cache_modifier=".cg")
    norms = (dim_ok, dim_ok, dim_ok, dim_ok)
    if NORM:
        norms = (
            _norm(query_norm_ptr, place_d, DIM), _norm(query_norm_ptr, other_d, DIM),
            _norm(key_norm_ptr, place_d, DIM), _norm(key_norm_ptr, other_d, DIM),
        )  # fmt: skip
    low = begin + (part - 1) * chunk
    high = tl.minimum(low + chunk, before)
    pages_ptr = table_ptr + slot * table_stride
    seen_l = low + place_l
    seen_ok = (seen_l < high) & (part > 0)
    page_l = tl.load(pages_ptr + seen_l // PAGE, mask=seen_ok, other=0, cache_modifier=".cg").to(tl.int64)
    offset_l = ((page_l * PAGE + seen_l % PAGE) * KV_HEADS + kv_head) * DIM
    seen = seen_ok[:, None] & dim_ok
    values = tl.load(values_ptr + offset_l[:, None] + place_d, mask=seen, other=0.0, cache_modifier=".cg")
    keys = tl.load(keys_ptr + offset_l[:, None] + place_d, mask=seen, other=0.0, cache_modifier=".cg")
    if EARLY:
        wait_for_previous()
        # Not before: where programs of many kernels wait on a processor, new ones crowd on the others.
        let_next_start()

    heads = KV_HEADS * GROUP + 2 * KV_HEADS
    source_m = qkv_ptr + ((first + row_m).to(tl.int64) * heads + head_m)[:, None] * DIM
    source_r = qkv_ptr + ((first + each).to(tl.int64) * heads + KV_HEADS * GROUP + kv_head)[:, None] * DIM
    q, swapped = tl.load(source_m + place_d, mask=tile, other=0.0), tl.load(source_m + other_d, mask=tile, other=0.0)
    own_k = tl.load(source_r + place_d, mask=own, other=0.0)
    own_swapped = tl.load(source_r + other_d, mask=own, other=0.0)
    own_v = tl.load(source_r + KV_HEADS * DIM + place_d, mask=own, other=0.0)
    # Before the branch, though one program needs it: inside, Triton converts each of these for the product.
    own_k = _turned(own_k, own_swapped, own_cos, own_sin, norms[2], norms[3], eps, NORM, DIM, EARLY)
    q = _turned(q, swapped, cos, sin, norms[0], norms[1], eps, NORM, DIM, EARLY)
    best_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_m = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if part == 0:
        if not DRAFT:
            goal = (place_r * KV_HEADS + kv_head)[:, None] * DIM + place_d
            tl.store(keys_ptr + goal, own_k, mask=own)
            tl.store(values_ptr + goal, own_v, mask=own)
        own_seen = own_ok[None, :]
        if not DRAFT:
            own_seen = own_seen & (each[None, :] <= row_m[:, None])
            if WINDOW > 0:
                own_seen = own_seen & (each[None, :] > row_m[:, None] - WINDOW)
        own_scores = tl.dot(q, tl.trans(own_k), input_precision="ieee") * scale
        best_m, sum_m, _, own_weights = fold(tl.where(own_seen, own_scores, float("-inf")), best_m, sum_m)
        mixed = tl.dot(own_weights.to(own_v.dtype), own_v, input_precision="ieee")
    else:
        visible = seen_ok[None, :]
        if WINDOW > 0 and not DRAFT:
            visible = visible & (seen_l[None, :] > position_m[:, None] - WINDOW)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        best_m, sum_m, _, weights = fold(tl.where(visible, scores, float("-inf")), best_m, sum_m)
        mixed = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        low += BLOCK_L
        if low < high:
            if LEAN:
                low, best_m, sum_m, mixed = look_lean(
                    low, high, pages_ptr, q, best_m, sum_m, mixed, keys_ptr, values_ptr, kv_head, scale,
                    KV_HEADS, DIM, PAGE, BLOCK_L, BLOCK_D,
                )  # fmt: skip
                page_p = tile_pages(pages_ptr, low, high, PAGE, BLOCK_L)
            for start in range(low, high, BLOCK_L):
                more_l = start + place_l
                more_ok = more_l < high
                if LEAN:
                    slot_l = tile_slots(page_p, PAGE, BLOCK_L)
                    page_p = tile_pages(pages_ptr, start + BLOCK_L, high, PAGE, BLOCK_L)
                else:
                    page_l = tl.load(pages_ptr + more_l // PAGE, mask=more_ok, other=0).to(tl.int64)
                    slot_l = page_l * PAGE + more_l % PAGE
                best_m, sum_m, mixed = look(
                    slot_l, more_l, more_ok, q, best_m, sum_m, mixed, position_m, position_m,
                    position_m, 0, keys_ptr, values_ptr, kv_head, tl.arange(0, BLOCK_D), scale,
                    True, False, DRAFT, WINDOW, KV_HEADS, DIM, BLOCK_D,
                )  # fmt: skip

    at_m = ((segment * (MOST + 1) + part) * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + place_m
    row_ok = row_m < rows
    tl.store(partial_ptr + at_m[:, None] * DIM + place_d, mixed, mask=tile)
    tl.store(sums_ptr + at_m[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(best_m, sum_m), mask=row_ok[:, None])


@triton.jit
def join_kernel(
    partial_ptr, sums_ptr, first_ptr, rows_ptr, lengths_ptr, sinks_ptr, out_ptr, WINDOW: tl.constexpr,
    MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, MIN_CHUNK: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One program: one head of a row, its parts in order. `FIRST`: the next kernel may start before this one waits."""
    if EARLY and FIRST:
        let_next_start()
    segment, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + segment, cache_modifier=".cg")
    # The one row of a padding request has no tokens.
    rows = tl.minimum(tl.load(rows_ptr + segment, cache_modifier=".cg"), length)
    first = tl.load(first_ptr + segment, cache_modifier=".cg")
    _begin, _chunk, splits = _shares(length - rows, WINDOW, MOST, BLOCK_L, MIN_CHUNK)
    place_p, place_d = tl.arange(0, PARTS), tl.arange(0, BLOCK_D)
    base = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if SINKS:
        base = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total += 1.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    if EARLY:
        wait_for_previous()
        if not FIRST:
            let_next_start()
    for start in range(0, tl.where(row < rows, splits + 1, 0), PARTS):
        part_p = start + place_p
        there = part_p <= splits
        at_p = ((segment * (MOST + 1) + part_p) * KV_HEADS + head // GROUP).to(tl.int64) * BLOCK_M
        at_p += row * GROUP + head % GROUP
        best_p = tl.load(sums_ptr + at_p * 2, mask=there, other=float("-inf"))
        sum_p = tl.load(sums_ptr + at_p * 2 + 1, mask=there, other=0.0)
        tile = there[:, None] & (place_d < DIM)[None, :]
        more = tl.load(partial_ptr + at_p[:, None] * DIM + place_d[None, :], mask=tile, other=0.0)
        # The first part, the row's own, has something for every row.
        above = tl.maximum(base, tl.max(best_p, axis=0))
        fade, grow_p = tl.exp2(base - above), tl.exp2(best_p - above)
        total = total * fade + tl.sum(sum_p * grow_p, axis=0)
        mixed = mixed * fade + tl.sum(more * grow_p[:, None], axis=0)
        base = above
    offset = ((first + row).to(tl.int64) * (KV_HEADS * GROUP) + head) * DIM
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + offset + place_d, mixed.to(out_ptr.dtype.element_ty), mask=place_d < DIM)


def fits(batch: RowSegments, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether these kernels are for such segments: of a few rows, or of one, that see everything before them."""
    few = batch.most_rows == 1 or (batch.tight and batch.most_rows <= MOST_ROWS)
    return few and batch.items is None and heads // kv_heads * batch.most_rows <= _MOST_SCORES and dim <= 128


class RowShape(msgspec.Struct, frozen=True):
    """Sizes of a launch that are fixed when its kernel is compiled. Segments have the same bits by all of one
    `block_l`."""

    block_l: int
    """Tokens that a program looks at in one turn."""
    warps: int
    stages: int
    """One more than turns of a `lean` loop that have loads under way; of another about twice as many as tiles."""
    lean: bool = False
    """Whole tiles, which begin where pages do, have no masks and page numbers that were read a turn before."""

    @classmethod
    def of(
        cls, group: int, most_rows: int, dim: int, element_bytes: int, page_size: int, window: int, lanes: int = 32
    ) -> RowShape:
        """For segments of up to `most_rows` rows whose key-value heads serve `group` query heads each, on a device with
        warps of `lanes`."""
        # Of one segment, however many there are: more stages take no more registers here.
        masked = AttentionShape.of(group, most_rows, dim, element_bytes, lanes=lanes, tight=True)
        shape = cls(masked.block_l, masked.warps, masked.stages)
        small = most_rows == 1 and element_bytes == 2 and masked.block_m == 16 and lanes == 32
        if not small or window or page_size & (page_size - 1) or shape.block_l % page_size:
            return shape
        # Three were fastest on an H200 with heads of 128, of which two programs have room on a processor. Of those with
        # heads of 64 five would have, and crowd where the product before has ended: more stages fill the memory.
        return msgspec.structs.replace(shape, lean=True, stages=6 if dim <= 64 else 3)


def row_attend(
    qkv_RYD: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    step: DeviceStep,
    batch: RowSegments,
    tables: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    rule: AttentionRule,
    out_RX: torch.Tensor,
    *,
    programs: int,
    early_start: bool = False,
    shape: RowShape | None = None,
) -> None:
    """`DeviceOps.rope_attend` of those segments of a step, which `fits`; the result goes to their rows of `out_RX`,
    [R, N * D], in the type of `qkv_RYD`, float32 or bfloat16.

    Rows of padding are not read and give zeros. Rows of a segment stand at the last of its tokens, and the step's
    `write_slots_R` say where their keys and values go; those of a draft's block go nowhere.
    `programs`: as in `attend`. `shape`: another than `RowShape.of` these segments.
    """
    _, packed, dim = qkv_RYD.shape
    kv_heads = keys_SKD.shape[1]
    heads = packed - 2 * kv_heads
    assert qkv_RYD.is_contiguous()
    assert out_RX.is_contiguous()
    assert keys_SKD.is_contiguous()
    assert values_SKD.is_contiguous()
    group, count, width = heads // kv_heads, len(batch.slots_B), batch.most_rows
    draft = step.block_base >= 0
    block_m = max(16, triton.next_power_of_2(group * width))
    block_d = max(16, triton.next_power_of_2(dim))
    size = qkv_RYD.element_size()
    shape = shape or RowShape.of(group, width, dim, size, step.page_size, rule.window, lanes_of_warps())
    assert not shape.lean or (not rule.window and shape.block_l % step.page_size == 0)
    # With the rows' own no more programs than have room at once: a last one that began late would take the longest.
    most = min(MAX_SPLITS, max(1, programs // kv_heads - 1))
    parts = count * (most + 1) * kv_heads * block_m
    partial = torch.empty(parts * dim, dtype=torch.float32, device=qkv_RYD.device)
    sums = torch.empty(parts * 2, dtype=torch.float32, device=qkv_RYD.device)
    query_norm_D, key_norm_D, eps = norms if norms is not None else (out_RX, out_RX, 0.0)
    scale = (1 / math.sqrt(dim) if rule.scale is None else rule.scale) * math.log2(math.e)
    where = (batch.first_B, batch.rows_B, batch.lengths_B)
    common = {
        "WINDOW": rule.window + 1 if draft and rule.window else rule.window, "MOST": most, "KV_HEADS": kv_heads,
        "GROUP": group, "DIM": dim, "BLOCK_M": block_m, "BLOCK_L": shape.block_l, "BLOCK_D": block_d,
        "MIN_CHUNK": MIN_CHUNK, "EARLY": early_start, **early.launch_options(early_start),
    }  # fmt: skip
    row_attend_kernel[(count * (most + 1) * kv_heads,)](
        qkv_RYD, keys_SKD, values_SKD, step.table_TP, batch.slots_B, *where, step.write_slots_R, *tables, query_norm_D,
        key_norm_D, partial, sums, step.table_TP.stride(0), eps, scale, PAGE=step.page_size, NORM=norms is not None,
        DRAFT=draft, LEAN=shape.lean, BLOCK_R=MOST_ROWS, num_warps=shape.warps, num_stages=shape.stages, **common,
    )  # fmt: skip
    join_kernel[(count, width, heads)](
        partial, sums, *where, out_RX if rule.sinks_N is None else rule.sinks_N, out_RX,
        SINKS=rule.sinks_N is not None, PARTS=_PARTS, FIRST=width > 1, num_warps=1, **common,
    )  # fmt: skip
