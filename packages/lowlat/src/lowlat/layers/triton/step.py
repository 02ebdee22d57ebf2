"""What a decode step begins and ends with: the rows of the slots that decode, and their most likely tokens.

Legend of shape suffixes: B requests, T slots, P pages of a slot, M samples, V vocabulary, Q parts of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.device_step import DecodeRows
from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

PART = 1024
"""Logits of one program of `part_kernel`."""


@triton.jit
def begin_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, table_ptr, other_table_ptr, rows_ptr, segments_ptr, padding_slot, size, stride,
    other_stride, PAGE: tl.constexpr, OTHER_PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows in one program. Padding rows write the same zero length, whatever the others do."""
    place = tl.arange(0, BLOCK)
    inside = place < size
    slot = tl.load(slots_ptr + place, mask=inside, other=0)
    before = tl.load(lengths_ptr + slot, mask=inside, other=0)
    after = before + (slot != padding_slot).to(tl.int64)
    tl.store(lengths_ptr + slot, after, mask=inside)
    tl.store(rows_ptr + place, tl.load(tokens_ptr + slot, mask=inside, other=0), mask=inside)
    tl.store(rows_ptr + size + place, before, mask=inside)
    tl.store(rows_ptr + 2 * size + place, after, mask=inside)
    page = tl.load(table_ptr + slot * stride + before // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(rows_ptr + 3 * size + place, page * PAGE + before % PAGE, mask=inside)
    if OTHER_PAGE > 0:
        page = tl.load(other_table_ptr + slot * other_stride + before // OTHER_PAGE, mask=inside, other=0).to(tl.int64)
        tl.store(rows_ptr + 4 * size + place, page * OTHER_PAGE + before % OTHER_PAGE, mask=inside)
    tl.store(segments_ptr + place, slot.to(tl.int32), mask=inside)
    tl.store(segments_ptr + size + place, place, mask=inside)
    tl.store(segments_ptr + 2 * size + place, place * 0 + 1, mask=inside)
    tl.store(segments_ptr + 3 * size + place, after.to(tl.int32), mask=inside)


@triton.jit
def part_kernel(logits_ptr, best_ptr, ids_ptr, vocabulary, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest logit of a part of a row and the first place where it is; NaN where there is one."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    place = part * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * vocabulary + place, mask=place < vocabulary, other=float("-inf"))
    best = tl.max(logits, axis=0)
    first = tl.min(tl.where(logits == best, place, 2147483647), axis=0)
    broken = tl.max((logits != logits).to(tl.int32), axis=0)
    tl.store(best_ptr + row * parts + part, tl.where(broken > 0, float("nan"), best))
    tl.store(ids_ptr + row * parts + part, first)


@triton.jit
def pick_kernel(
    best_ptr, ids_ptr, slots_ptr, tokens_ptr, out_ptr, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < parts
    best = tl.load(best_ptr + row * parts + place, mask=inside, other=float("-inf"))
    ids = tl.load(ids_ptr + row * parts + place, mask=inside, other=2147483647)
    largest = tl.max(best, axis=0)
    broken = tl.max((best != best).to(tl.int32), axis=0)
    token = tl.min(tl.where(best == largest, ids, 2147483647), axis=0).to(tl.int64)
    usable = (broken == 0) & (tl.abs(largest) < float("inf"))
    tl.store(out_ptr + row, tl.where(usable, token, -1))
    # The step after this one must not look up what is no token.
    tl.store(tokens_ptr + tl.load(slots_ptr + row), tl.where(usable, token, 0))


def begin_decodes(
    slots_B: torch.Tensor,
    padding_slot: int,
    tokens_T: torch.Tensor,
    lengths_T: torch.Tensor,
    tables: list[tuple[torch.Tensor, int]],
) -> DecodeRows:
    """As `DeviceOps.begin_decodes`, in one kernel."""
    size, device = len(slots_B), slots_B.device
    rows_XB = torch.empty(3 + len(tables), size, dtype=torch.int64, device=device)
    segments_4B = torch.empty(4, size, dtype=torch.int32, device=device)
    (table_TP, page), (other_TP, other_page) = tables[0], tables[1] if tables[1:] else (tables[0][0], 0)
    begin_kernel[(1,)](
        slots_B, tokens_T, lengths_T, table_TP, other_TP, rows_XB, segments_4B, padding_slot, size,
        table_TP.stride(0), other_TP.stride(0), PAGE=page, OTHER_PAGE=other_page,
        BLOCK=max(16, triton.next_power_of_2(size)), num_warps=1,
    )  # fmt: skip
    tokens_B, before_B, after_B, *places = rows_XB.unbind()
    return DecodeRows(tokens_B, before_B, after_B, places, *segments_4B.unbind())


def greedy(
    logits_MV: torch.Tensor, slots_M: torch.Tensor, tokens_T: torch.Tensor, *, early_start: bool = False
) -> torch.Tensor:
    """As `DeviceOps.greedy`, in two kernels."""
    rows, vocabulary = logits_MV.shape
    assert logits_MV.is_contiguous()
    parts = triton.cdiv(vocabulary, PART)
    best_MQ = torch.empty(rows, parts, dtype=torch.float32, device=logits_MV.device)
    ids_MQ = torch.empty(rows, parts, dtype=torch.int32, device=logits_MV.device)
    out_M = torch.empty(rows, dtype=torch.int64, device=logits_MV.device)
    options = {"EARLY": early_start, "num_warps": 4, **early.launch_options(early_start)}
    part_kernel[(parts, rows)](logits_MV, best_MQ, ids_MQ, vocabulary, parts, BLOCK=PART, **options)
    block = triton.next_power_of_2(parts)
    pick_kernel[(rows,)](best_MQ, ids_MQ, slots_M, tokens_T, out_M, parts, BLOCK=block, **options)
    return out_M
