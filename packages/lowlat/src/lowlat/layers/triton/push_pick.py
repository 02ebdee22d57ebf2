"""The most likely tokens of a step whose logits lie in columns on several GPUs: each rank pushes its best one.

As in `push_reduce`: tagged words in the peers' memory, a bounded wait, rows that count on the device. A rank's best
logit and its token are two words.

Legend of shape suffixes: M samples, C columns of this rank, T slots, Q parts of the columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lowlat.layers.triton.early import launch_options, let_next_start, wait_for_previous
from lowlat.layers.triton.push_reduce import push_word, tell_failure, wait_asm, wait_for_words
from lowlat.layers.triton.step import PART, part_kernel

_LANES = 32
"""Words of a row in an inbox, one a thread: two are used."""


@triton.jit
def push_pick_kernel(
    best_ptr, ids_ptr, slots_ptr, tokens_ptr, out_ptr, memories_ptr, tags_ptr, alarm_ptr, parts, first, deadline_ns,
    OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, WAIT: tl.constexpr, WAIT_CONSTRAINTS: tl.constexpr, WAIT_TYPES: tl.constexpr,
    PLAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program, of one warp: one row. `first`: the token of this rank's first column."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0)
    tag = tl.load(tags_ptr + row) + 1
    own = tl.load(memories_ptr + RANK)
    broken = tl.load(own.to(tl.pointer_type(tl.int32)))
    place = tl.arange(0, BLOCK)
    inside = place < parts
    best = tl.load(best_ptr + row.to(tl.int64) * parts + place, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row.to(tl.int64) * parts + place, mask=inside, other=2147483647)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, ids, 2147483647), axis=0) + first
    value = tl.where(tl.max((best != best).to(tl.int32), axis=0) > 0, float("nan"), largest)
    lane = tl.arange(0, LANES)
    mine = tl.where(lane == 0, value.to(tl.int32, bitcast=True), token)
    half = (tag & 1) * RANKS
    after = tl.zeros([LANES], tl.int32)
    for turn in tl.static_range(1, RANKS):
        peer = (tl.load(memories_ptr + (RANK + turn) % RANKS) + OFFSET).to(tl.pointer_type(tl.int64))
        after += push_word(peer + ((half + RANK) * ROWS + row) * LANES + lane, mine, tag, PLAIN)
    where = (own + OFFSET).to(tl.pointer_type(tl.int64)) + (half * ROWS + row) * LANES + lane + after
    got = wait_for_words(
        where, tag, own, tl.where(broken != 0, 0, deadline_ns), WAIT, WAIT_CONSTRAINTS, WAIT_TYPES, 1,
        RANK, RANKS, ROWS * LANES, PLAIN,
    )  # fmt: skip
    failed = (tl.max(got[0], axis=0) | broken) != 0
    chosen = tl.full([], 0, tl.int32)
    highest = tl.full([], float("-inf"), tl.float32)
    usable = failed == 0
    for source in tl.static_range(RANKS):
        if source == RANK:
            words = mine
        elif source < RANK:
            words = got[source + 1]
        else:
            words = got[source]
        value = tl.sum(tl.where(lane == 0, words, 0), axis=0).to(tl.float32, bitcast=True)
        token = tl.sum(tl.where(lane == 1, words, 0), axis=0)
        usable = usable & (value == value)
        chosen = tl.where(value > highest, token, chosen)
        highest = tl.where(value > highest, value, highest)
    usable = usable & (tl.abs(highest) < float("inf"))
    tl.store(out_ptr + row, tl.where(usable, chosen, -1).to(tl.int64))
    # The step after this one must not look up what is no token.
    tl.store(tokens_ptr + tl.load(slots_ptr + row), tl.where(usable, chosen, 0).to(tl.int64))
    tl.store(tags_ptr + row, tag)
    if failed:
        tell_failure(memories_ptr, alarm_ptr, tag, RANKS)


def pick_bytes(ranks: int, rows: int) -> int:
    """Bytes of a rank's memory for up to `rows` rows; they must be 0 before the first step."""
    return 8 * 2 * ranks * rows * _LANES


def constants(ranks: int, rank: int, rows: int, offset: int, *, plain: bool, early: bool) -> dict[str, Any]:
    """The kernel's constant arguments but `BLOCK`."""
    wait, constraints = wait_asm(ranks, rank, 8 * rows * _LANES, 1)
    return {
        "OFFSET": offset, "RANK": rank, "RANKS": ranks, "ROWS": rows, "LANES": _LANES, "WAIT": wait,
        "WAIT_CONSTRAINTS": constraints, "WAIT_TYPES": (tl.int32,) * ranks, "PLAIN": plain, "EARLY": early,
    }  # fmt: skip


def push_pick(
    logits_MC: torch.Tensor,
    first: int,
    slots_M: torch.Tensor,
    tokens_T: torch.Tensor,
    *,
    memories: torch.Tensor,
    offset: int,
    tags: torch.Tensor,
    alarm: torch.Tensor,
    rank: int,
    deadline_s: float,
    early_start: bool = False,
    plain: bool = False,
) -> torch.Tensor:
    """The first most likely token of each row over all ranks, int64 (-1 where logits are not numbers), also written to
    `tokens_T` at `slots_M` (0 there). Float32, contiguous.

    `first`: the token of column 0. `offset`: where `pick_bytes` bytes begin in every rank's memory. The rest as in
    `push_reduce_norm`.
    """
    count, columns = logits_MC.shape
    parts, device = triton.cdiv(columns, PART), logits_MC.device
    assert logits_MC.is_contiguous()
    assert count <= len(tags)
    best_MQ = torch.empty(count, parts, dtype=torch.float32, device=device)
    ids_MQ = torch.empty(count, parts, dtype=torch.int32, device=device)
    out_M = torch.empty(count, dtype=torch.int64, device=device)
    options = launch_options(early_start)
    part_kernel[(parts, count)](
        logits_MC, best_MQ, ids_MQ, columns, parts, BLOCK=PART, EARLY=early_start, num_warps=4, **options
    )
    push_pick_kernel[(count,)](
        best_MQ, ids_MQ, slots_M, tokens_T, out_M, memories, tags, alarm, parts, first, int(deadline_s * 1e9),
        BLOCK=triton.next_power_of_2(parts), num_warps=1, **options,
        **constants(len(memories), rank, len(tags), offset, plain=plain, early=early_start),
    )  # fmt: skip
    return out_M
