"""How alike a draft's and its target's distributions are, and the slope of that, over vocabularies too large to keep
anything beside the logits.

Legend of shape suffixes: R rows, V vocabulary, C columns of a table of numbers a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
HEATS = 3
"""Columns of a row's factors on logits: of both for the cross entropy; of the draft's and of the target's for the
overlap."""
FOUND = 8
"""Columns of what is found of a row: cross entropy, overlap, then what `slope` needs."""


@triton.jit
def likeness_kernel(
    scores_ptr, target_ptr, heats_ptr, found_ptr, vocabulary, CROSS: tl.constexpr, OVERLAP: tl.constexpr,
    FOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    both, mine, its = tl.load(heats_ptr + row * 3), tl.load(heats_ptr + row * 3 + 1), tl.load(heats_ptr + row * 3 + 2)
    scores_ptr += row * vocabulary
    target_ptr += row * vocabulary
    place = tl.arange(0, BLOCK)
    best_s = -1e30 + both * 0
    best_t = best_s
    both_s, both_t, mine_s, its_t, cross = both * 0, both * 0, both * 0, both * 0, both * 0
    for start in range(0, vocabulary, BLOCK):
        inside = start + place < vocabulary
        s = tl.load(scores_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(target_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        high_s, high_t = tl.maximum(best_s, tl.max(s, axis=0)), tl.maximum(best_t, tl.max(t, axis=0))
        if CROSS:
            both_s = both_s * tl.exp((best_s - high_s) * both) + tl.sum(tl.exp((s - high_s) * both), axis=0)
            fading = tl.exp((best_t - high_t) * both)
            chance = tl.exp((t - high_t) * both)
            both_t = both_t * fading + tl.sum(chance, axis=0)
            cross = cross * fading + tl.sum(tl.where(inside, chance * s, 0.0), axis=0)
        if OVERLAP:
            mine_s = mine_s * tl.exp((best_s - high_s) * mine) + tl.sum(tl.exp((s - high_s) * mine), axis=0)
            its_t = its_t * tl.exp((best_t - high_t) * its) + tl.sum(tl.exp((t - high_t) * its), axis=0)
        best_s, best_t = high_s, high_t
    found_ptr += row * FOUND
    if CROSS:
        log_both_s, log_both_t = best_s * both + tl.log(both_s), best_t * both + tl.log(both_t)
        tl.store(found_ptr, log_both_s - cross / both_t * both)
        tl.store(found_ptr + 3, log_both_s)
        tl.store(found_ptr + 4, log_both_t)
    if OVERLAP:
        log_mine, log_its = best_s * mine + tl.log(mine_s), best_t * its + tl.log(its_t)
        overlap, lower = both * 0, both * 0
        for start in range(0, vocabulary, BLOCK):
            inside = start + place < vocabulary
            s = tl.load(scores_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(target_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
            q, p = tl.exp(s * mine - log_mine), tl.exp(t * its - log_its)
            overlap += tl.sum(tl.minimum(q, p), axis=0)
            lower += tl.sum(tl.where(q < p, q, 0.0), axis=0)
        tl.store(found_ptr + 1, overlap)
        tl.store(found_ptr + 2, lower)
        tl.store(found_ptr + 5, log_mine)
        tl.store(found_ptr + 6, log_its)


@triton.jit
def slope_kernel(
    scores_ptr, target_ptr, heats_ptr, found_ptr, weights_ptr, vocabulary, CROSS: tl.constexpr, OVERLAP: tl.constexpr,
    FOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    both, mine, its = tl.load(heats_ptr + row * 3), tl.load(heats_ptr + row * 3 + 1), tl.load(heats_ptr + row * 3 + 2)
    distance, alike = tl.load(weights_ptr + row * 2), tl.load(weights_ptr + row * 2 + 1) * mine
    found_ptr += row * FOUND
    scores_ptr += row * vocabulary
    target_ptr += row * vocabulary
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    s = tl.load(scores_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(target_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    if CROSS:
        slope += distance * tl.exp(s * both - tl.load(found_ptr + 3))
        slope -= distance * tl.exp(t * both - tl.load(found_ptr + 4))
    if OVERLAP:
        q, p = tl.exp(s * mine - tl.load(found_ptr + 5)), tl.exp(t * its - tl.load(found_ptr + 6))
        slope -= alike * q * (tl.where(q < p, 1.0, 0.0) - tl.load(found_ptr + 2))
    tl.store(scores_ptr + columns, slope.to(scores_ptr.dtype.element_ty), mask=inside)


def likeness(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    *,
    cross: bool = True,
    overlap: bool = True,
) -> torch.Tensor:
    """[R, FOUND] float32; rows must lie one after another in memory, and `heats_RC` is float32 [R, HEATS]. What is not
    asked for is left 0: exponentials are what takes the time."""
    for part in (scores_RV, target_RV, heats_RC):
        assert part.is_contiguous()
    rows, vocabulary = scores_RV.shape
    found_RC = torch.zeros(rows, FOUND, device=scores_RV.device)
    likeness_kernel[(rows,)](
        scores_RV, target_RV, heats_RC, found_RC, vocabulary, CROSS=cross, OVERLAP=overlap, FOUND=FOUND, BLOCK=_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return found_RC


def slope_(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    found_RC: torch.Tensor,
    weights_RC: torch.Tensor,
    *,
    cross: bool = True,
    overlap: bool = True,
) -> torch.Tensor:
    """The slope in the scores of: weights 0 times cross entropy times temperature, less weights 1 times overlap. Takes
    the place of the scores."""
    rows, vocabulary = scores_RV.shape
    assert weights_RC.is_contiguous()
    slope_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
        scores_RV, target_RV, heats_RC, found_RC, weights_RC, vocabulary, CROSS=cross, OVERLAP=overlap, FOUND=FOUND,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return scores_RV
