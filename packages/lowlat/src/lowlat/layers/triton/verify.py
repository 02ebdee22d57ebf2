"""The beginning and the end of a step that checks guesses, each in one launch; see `layers/verify.py`.

Legend of shape suffixes: B padded requests, W rows of a request, G = W - 1 guesses, R = B * W rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early
from lowlat.layers.verify import SlotTables, VerifyRows

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous


@triton.jit
def begin_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, ends_ptr, widths_ptr, pages_ptr, guesses_ptr, counts_ptr, wide_ptr, narrow_ptr,
    history_ptr, requests, pages_stride, most_pages, padding_place, history_stride, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, COUNTS: tl.constexpr, HISTORY: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one request. `wide` holds tokens, positions, places, slots and next places of all rows; `narrow`
    rows, lengths, slots and first rows of all requests."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    before = tl.load(lengths_ptr + slot)
    most = tl.load(ends_ptr + slot) - before
    rows = tl.minimum(tl.load(widths_ptr + slot), most)
    if COUNTS:
        rows = tl.minimum(rows, tl.load(counts_ptr + request) + 1)
    rows = tl.maximum(tl.minimum(rows, WIDTH), 0)
    place = tl.arange(0, BLOCK_W)
    inside = place < WIDTH
    real = place < rows
    guess = tl.load(guesses_ptr + request * (WIDTH - 1) + place - 1, mask=real & (place > 0), other=0)
    newest = tl.load(tokens_ptr + slot)
    if HISTORY and rows > 0:
        tl.store(history_ptr + slot * history_stride + before, newest.to(tl.int32))
    token = tl.where(place == 0, newest, guess)
    position = before + place
    page_index = tl.minimum(position // PAGE, most_pages - 1)
    page = tl.load(pages_ptr + slot * pages_stride + page_index, mask=real, other=0).to(tl.int64)
    row = request * WIDTH + place
    total = requests * WIDTH
    tl.store(wide_ptr + row, tl.where(real, token, 0), mask=inside)
    tl.store(wide_ptr + total + row, tl.where(real, position, 0), mask=inside)
    tl.store(wide_ptr + 2 * total + row, tl.where(real, page * PAGE + position % PAGE, padding_place), mask=inside)
    tl.store(wide_ptr + 3 * total + row, slot, mask=inside)
    tl.store(wide_ptr + 4 * total + row, position + 1, mask=inside)
    tl.store(narrow_ptr + request, rows.to(tl.int32))
    tl.store(narrow_ptr + requests + request, tl.where(rows > 0, before + rows, 0).to(tl.int32))
    tl.store(narrow_ptr + 2 * requests + request, slot.to(tl.int32))
    tl.store(narrow_ptr + 3 * requests + request, request * WIDTH)


@triton.jit
def accept_kernel(
    chosen_ptr, guesses_ptr, rows_ptr, slots_ptr, tokens_ptr, lengths_ptr, ends_ptr, forced_ptr, result_ptr,
    history_ptr, history_stride, WIDTH: tl.constexpr, FORCED: tl.constexpr, HISTORY: tl.constexpr,
    BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one request."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    request = tl.program_id(0)
    place = tl.arange(0, BLOCK_W)
    inside = place < WIDTH
    slot = tl.load(slots_ptr + request)
    rows = tl.load(rows_ptr + request)
    chosen = tl.load(chosen_ptr + request * WIDTH + place, mask=inside, other=-1)
    guess = tl.load(guesses_ptr + request * (WIDTH - 1) + place, mask=place + 1 < WIDTH, other=-1)
    wrong = (chosen != guess) | (place + 1 >= rows)
    # The first row whose guess is wrong, or that has none, is the last that counts.
    last = tl.min(tl.where(wrong & inside, place, WIDTH - 1), axis=0)
    if FORCED:
        last = tl.maximum(tl.minimum(tl.load(forced_ptr + request), rows) - 1, 0)
        chosen = tl.where(place < last, guess, chosen)
    token = tl.sum(tl.where(place == last, chosen, 0), axis=0)
    count = tl.where(rows > 0, last + 1, 0)
    if (rows > 0) & (token >= 0):
        tl.store(tokens_ptr + slot, token)
        before = tl.load(lengths_ptr + slot)
        if HISTORY:
            at = before + 1 + place
            kept = (place <= last) & (at < history_stride)
            tl.store(history_ptr + slot * history_stride + at, chosen.to(tl.int32), mask=kept)
        after = tl.minimum(before + count, tl.load(ends_ptr + slot) - 1)
        tl.store(lengths_ptr + slot, after)
    out = result_ptr + request * (WIDTH + 2)
    tl.store(out, tl.where((rows > 0) & (token < 0), -1, count).to(tl.int64))
    tl.store(out + 1, rows.to(tl.int64))
    tl.store(out + 2 + place, chosen, mask=inside)


def begin_rows(
    slots_B: torch.Tensor,
    tables: SlotTables,
    guesses_BG: torch.Tensor,
    counts_B: torch.Tensor | None,
    *,
    early_start: bool = False,
) -> VerifyRows:
    """As `verify.begin_rows`."""
    requests, width = guesses_BG.shape[0], guesses_BG.shape[1] + 1
    assert guesses_BG.is_contiguous()
    wide = torch.empty(5, requests * width, dtype=torch.int64, device=slots_B.device)
    narrow = torch.empty(4, requests, dtype=torch.int32, device=slots_B.device)
    history_TL = slots_B if tables.history_TL is None else tables.history_TL
    begin_kernel[(requests,)](
        slots_B, tables.tokens_T, tables.lengths_T, tables.ends_T, tables.widths_T, tables.pages_TP, guesses_BG,
        slots_B if counts_B is None else counts_B, wide, narrow, history_TL, requests,
        tables.pages_TP.stride(0), tables.pages_TP.shape[1], tables.padding_page * tables.page_size,
        history_TL.stride(0), PAGE=tables.page_size, WIDTH=width, COUNTS=counts_B is not None,
        HISTORY=tables.history_TL is not None, BLOCK_W=triton.next_power_of_2(width), EARLY=early_start, num_warps=1,
        **early.launch_options(early_start),
    )  # fmt: skip
    tokens_R, positions_R, places_R, slots_R, next_R = wide
    rows_B, lengths_B, narrow_B, first_B = narrow
    return VerifyRows(tokens_R, positions_R, places_R, rows_B, lengths_B, narrow_B, first_B, slots_R, next_R)


def accept(
    chosen_R: torch.Tensor,
    rows: VerifyRows,
    slots_B: torch.Tensor,
    tables: SlotTables,
    guesses_BG: torch.Tensor,
    forced_B: torch.Tensor | None = None,
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """As `verify.accept`."""
    requests, width = guesses_BG.shape[0], guesses_BG.shape[1] + 1
    assert chosen_R.is_contiguous()
    assert guesses_BG.is_contiguous()
    result_BX = torch.empty(requests, width + 2, dtype=torch.int64, device=slots_B.device)
    history_TL = slots_B if tables.history_TL is None else tables.history_TL
    accept_kernel[(requests,)](
        chosen_R, guesses_BG, rows.rows_B, slots_B, tables.tokens_T, tables.lengths_T, tables.ends_T,
        slots_B if forced_B is None else forced_B, result_BX, history_TL, history_TL.stride(0), WIDTH=width,
        FORCED=forced_B is not None, HISTORY=tables.history_TL is not None,
        BLOCK_W=triton.next_power_of_2(width), EARLY=early_start, num_warps=1, **early.launch_options(early_start),
    )  # fmt: skip
    return result_BX
