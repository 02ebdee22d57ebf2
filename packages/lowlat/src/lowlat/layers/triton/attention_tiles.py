"""Tiles of tokens that attention looks at one after another, and a loop over those that need no mask.

Legend of shape suffixes: as in `attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(scores, best_m, sum_m):
    """Best scores and sums with these too, what earlier sums fade by, and the scores' weights."""
    next_m = tl.maximum(best_m, tl.max(scores, axis=1))
    # A row that has seen nothing yet must not subtract infinities.
    base_m = tl.where(next_m == float("-inf"), 0.0, next_m)
    weights = tl.exp2(scores - base_m[:, None])
    fade_m = tl.exp2(best_m - base_m)
    return next_m, sum_m * fade_m + tl.sum(weights, axis=1), fade_m, weights


@triton.jit
def tile_pages(pages_ptr, start, high, PAGE: tl.constexpr, BLOCK_L: tl.constexpr):
    """Page numbers of a tile of tokens from `start`, where a page begins, up to `high`."""
    place_p = tl.arange(0, BLOCK_L // PAGE)
    return tl.load(pages_ptr + start // PAGE + place_p, mask=start + place_p * PAGE < high, other=0)


@triton.jit
def tile_slots(page_p, PAGE: tl.constexpr, BLOCK_L: tl.constexpr):
    """Slots of the tokens of a tile in these pages."""
    slots = (page_p.to(tl.int64) * PAGE)[:, None] + tl.arange(0, PAGE)[None, :]
    return tl.reshape(slots, [BLOCK_L])


@triton.jit
def look(
    slot_l, seen_l, seen_ok, q, best_m, sum_m, mixed, position_m, begin_m, distance_m, prefix,
    keys_ptr, values_ptr, kv_head, place_d, scale,
    MASKED: tl.constexpr, ITEMS: tl.constexpr, DRAFT: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIKE: tl.constexpr = False,
):  # fmt: skip
    """One tile of tokens `seen_l` in slots `slot_l`, those of `seen_ok`: best scores, sums and mixed values with them.
    Not `MASKED`: all are there, and every row sees them. `ALIKE`: with the bits that they have by a mask."""
    dim_ok = place_d < DIM
    offset_l = (slot_l * KV_HEADS + kv_head) * DIM
    key_places = keys_ptr + offset_l[None, :] + place_d[:, None]
    value_places = values_ptr + offset_l[:, None] + place_d[None, :]
    if MASKED:
        keys = tl.load(key_places, mask=dim_ok[:, None] & seen_ok[None, :], other=0.0)
    elif DIM < BLOCK_D:
        keys = tl.load(key_places, mask=dim_ok[:, None], other=0.0)
    else:
        keys = tl.load(key_places)
    scores = tl.dot(q, keys, input_precision="ieee") * scale
    if MASKED:
        visible = seen_ok[None, :]
        if not DRAFT:
            visible = visible & (seen_l[None, :] <= position_m[:, None])
        if ITEMS:
            shared = seen_l[None, :] < prefix
            visible = visible & (shared | (seen_l[None, :] >= begin_m[:, None]))
            if WINDOW > 0:
                edge = tl.where(shared, distance_m[:, None], position_m[:, None])
                visible = visible & (seen_l[None, :] > edge - WINDOW)
        elif WINDOW > 0 and not DRAFT:
            visible = visible & (seen_l[None, :] > position_m[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    elif ALIKE:
        # Without a choice in between, the product with the scale would be fused with the difference from the best.
        scores = tl.where(seen_ok[None, :], scores, float("-inf"))
    next_m, sum_m, fade_m, weights = fold(scores, best_m, sum_m)
    if MASKED:
        values = tl.load(value_places, mask=seen_ok[:, None] & dim_ok[None, :], other=0.0)
    elif DIM < BLOCK_D:
        values = tl.load(value_places, mask=dim_ok[None, :], other=0.0)
    else:
        values = tl.load(value_places)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade_m[:, None], input_precision="ieee")
    return next_m, sum_m, mixed


@triton.jit
def look_lean(
    low, high, pages_ptr, q, best_m, sum_m, mixed, keys_ptr, values_ptr, kv_head, scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The whole tiles of tokens from `low` up to `high`, all of which every row sees: where the rest begins, and the
    state of the softmax. Page numbers come a turn ahead of their tokens."""
    place_l, place_d = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
    clear = low + tl.maximum(high - low, 0) // BLOCK_L * BLOCK_L
    page_p = tile_pages(pages_ptr, low, high, PAGE, BLOCK_L)
    for start in range(low, clear, BLOCK_L):
        slot_l = tile_slots(page_p, PAGE, BLOCK_L)
        page_p = tile_pages(pages_ptr, start + BLOCK_L, high, PAGE, BLOCK_L)
        # Of the whole tile, and nothing that the compiler knows.
        seen_ok = place_l * 0 + start < high
        best_m, sum_m, mixed = look(
            slot_l, slot_l, seen_ok, q, best_m, sum_m, mixed, 0, 0, 0, 0, keys_ptr, values_ptr, kv_head, place_d,
            scale, False, False, False, 0, KV_HEADS, DIM, BLOCK_D, True,
        )  # fmt: skip
    return clear, best_m, sum_m, mixed
