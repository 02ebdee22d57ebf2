"""Guesses from what followed the same tokens before, in two launches; see `layers/history.py`.

Legend of shape suffixes: B padded requests, G guesses, P parts of a slot's tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.history import LONGEST
from lowlat.layers.triton import early
from lowlat.layers.verify import SlotTables

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

_BLOCK = 1024
# A longer run outweighs every place.
_RUN = tl.constexpr(1 << 40)


@triton.jit
def seek_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, history_ptr, best_ptr, stride, parts, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the longest and latest run that ends in a part of a request's tokens; -1: none."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    request = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + request)
    end = tl.load(lengths_ptr + slot)
    own_ptr = history_ptr + slot * stride
    place = part * BLOCK + tl.arange(0, BLOCK)
    alive = place < end
    best = tl.full([], -1, tl.int64)
    if part * BLOCK < end:
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(LONGEST):
            if back == 0:
                mine = tl.load(tokens_ptr + slot).to(tl.int32)
            else:
                mine = tl.load(own_ptr + end - back, mask=end >= back, other=-1)
            alive = alive & (place >= back)
            theirs = tl.load(own_ptr + place - back, mask=alive, other=-2)
            alive = alive & (theirs == mine)
            run += alive.to(tl.int64)
        best = tl.max(tl.where(run >= SHORTEST, run * _RUN + place, -1), axis=0)
    tl.store(best_ptr + request * parts + part, best)


@triton.jit
def follow_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, history_ptr, best_ptr, others_ptr, guesses_ptr, counts_ptr, stride,
    parts, COUNT: tl.constexpr, OTHERS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the guesses of a request."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    end = tl.load(lengths_ptr + slot)
    place_p = tl.arange(0, BLOCK_P)
    best = tl.max(tl.load(best_ptr + request * parts + place_p, mask=place_p < parts, other=-1), axis=0)
    place = best % _RUN
    ahead = tl.arange(0, BLOCK_G)
    source = place + 1 + ahead % tl.maximum(end - place, 1)
    known = (best >= 0) & (source < end) & (ahead < COUNT)
    guess = tl.load(history_ptr + slot * stride + source, mask=known, other=0).to(tl.int64)
    guess = tl.where((best >= 0) & (source == end), tl.load(tokens_ptr + slot), guess)
    number = tl.where(best >= 0, COUNT, 0)
    if OTHERS:
        other = tl.load(others_ptr + request * COUNT + ahead, mask=ahead < COUNT, other=0)
        guess = tl.where(best >= 0, guess, other)
        number = COUNT
    tl.store(guesses_ptr + request * COUNT + ahead, guess, mask=ahead < COUNT)
    tl.store(counts_ptr + request, number)


def find_again(
    slots_B: torch.Tensor,
    tables: SlotTables,
    count: int,
    shortest: int = 1,
    others_BG: torch.Tensor | None = None,
    *,
    early_start: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `history.find_again`."""
    history_TL = tables.history_TL
    assert history_TL is not None
    assert others_BG is None or others_BG.is_contiguous()
    requests, stride = len(slots_B), history_TL.shape[1]
    parts = triton.cdiv(stride, _BLOCK)
    best_BP = torch.empty(requests, parts, dtype=torch.int64, device=slots_B.device)
    guesses_BG = torch.empty(requests, count, dtype=torch.int64, device=slots_B.device)
    counts_B = torch.empty(requests, dtype=torch.int64, device=slots_B.device)
    where = (slots_B, tables.tokens_T, tables.lengths_T, history_TL, best_BP)
    options = {"EARLY": early_start, **early.launch_options(early_start)}
    seek_kernel[(requests, parts)](
        *where, stride, parts, SHORTEST=shortest, LONGEST=LONGEST, BLOCK=_BLOCK, num_warps=4, **options
    )
    follow_kernel[(requests,)](
        *where, guesses_BG if others_BG is None else others_BG, guesses_BG, counts_B, stride, parts, COUNT=count,
        OTHERS=others_BG is not None, BLOCK_G=triton.next_power_of_2(count),
        BLOCK_P=triton.next_power_of_2(parts), num_warps=1, **options,
    )  # fmt: skip
    return guesses_BG, counts_B
