"""What a decode step reads of its slots' states, and what it writes back: one launch each.

Legend of shape suffixes: B requests, T slots, P pages of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous


@triton.jit
def take_slots_kernel(
    slots_ptr, tokens_ptr, lengths_ptr, pages_ptr, token_ptr, place_ptr, write_ptr, after_ptr, row_ptr, count, width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: all requests. It begins a body, so there is nothing that it could wait for by itself."""
    if EARLY:
        let_next_start()
    at = tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(slots_ptr + at, mask=inside, other=0)
    length = tl.load(lengths_ptr + slot, mask=inside, other=0)
    page = tl.load(pages_ptr + slot * width + length // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(token_ptr + at, tl.load(tokens_ptr + slot, mask=inside, other=0), mask=inside)
    tl.store(place_ptr + at, length, mask=inside)
    tl.store(write_ptr + at, page * PAGE + length % PAGE, mask=inside)
    tl.store(after_ptr + at, (length + 1).to(tl.int32), mask=inside)
    tl.store(row_ptr + at, slot.to(tl.int32), mask=inside)


@triton.jit
def put_tokens_kernel(
    slots_ptr, chosen_ptr, tokens_ptr, lengths_ptr, count, padding,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: all requests."""
    if EARLY:
        wait_for_previous()
    at = tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(slots_ptr + at, mask=inside, other=0)
    token = tl.load(chosen_ptr + at, mask=inside, other=0)
    length = tl.load(lengths_ptr + slot, mask=inside, other=0)
    tl.store(tokens_ptr + slot, tl.maximum(token, 0), mask=inside)
    tl.store(lengths_ptr + slot, length + 1, mask=inside & (slot != padding))


def take_slots(
    slots_B: torch.Tensor,
    tokens_T: torch.Tensor,
    lengths_T: torch.Tensor,
    pages_TP: torch.Tensor,
    page_size: int,
    *,
    early_start: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `DeviceOps.take_slots`."""
    count = len(slots_B)
    token_B, place_B, write_B = (torch.empty_like(slots_B) for _ in range(3))
    after_B, row_B = (torch.empty(count, dtype=torch.int32, device=slots_B.device) for _ in range(2))
    take_slots_kernel[(1,)](
        slots_B, tokens_T, lengths_T, pages_TP, token_B, place_B, write_B, after_B, row_B, count, pages_TP.shape[1],
        PAGE=page_size, BLOCK=triton.next_power_of_2(count), EARLY=early_start, num_warps=1,
    )  # fmt: skip
    return token_B, place_B, write_B, after_B, row_B


def put_tokens(
    slots_B: torch.Tensor,
    chosen_B: torch.Tensor,
    tokens_T: torch.Tensor,
    lengths_T: torch.Tensor,
    padding: int,
    *,
    early_start: bool = False,
) -> None:
    """As `DeviceOps.put_tokens`."""
    count = len(slots_B)
    put_tokens_kernel[(1,)](
        slots_B, chosen_B, tokens_T, lengths_T, count, padding, BLOCK=triton.next_power_of_2(count), EARLY=early_start,
        num_warps=1, **early.launch_options(early_start),
    )  # fmt: skip
