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
match."""
FOUND = 16
"""Columns of what is found of a row: cross entropy, chance of a match, then what `slope` needs."""
_STEEP = (9, 13)
"""Columns of those with how steep the match is: with the likeliest token, and with another."""
_LIKELIEST, _LOG_ITS = 7, 6
MOST: tl.constexpr = tl.constexpr(40.0)
"""Of the logarithm of one chance over another."""


@triton.jit
def _match(s_ptr, t_ptr, token, mine, its, log_mine, log_its, weight, vocabulary, BLOCK: tl.constexpr):
    """Chance that the draft's token is the target's, given that this is `token`, times `weight`; what the slope needs:
    log of p over q there, weight over the squared sum, and the part of the sum that the draft sets."""
    place = tl.arange(0, BLOCK)
    log_p = tl.load(t_ptr + token).to(tl.float32) * its - log_its
    ratio = log_p - (tl.load(s_ptr + token).to(tl.float32) * mine - log_mine)
    ratio = tl.minimum(tl.maximum(ratio, -MOST), MOST)
    whole, drafts = log_p * 0, log_p * 0
    for start in range(0, vocabulary, BLOCK):
        inside = start + place < vocabulary
        s = tl.load(s_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t_ptr + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        p, q = tl.exp(t * its - log_its), tl.exp(s * mine - log_mine + ratio)
        above = (q > p) & (start + place != token)
        whole += tl.sum(tl.where(above, q, p), axis=0)
        drafts += tl.sum(tl.where(above, q, 0.0), axis=0)
    return weight / whole, ratio, weight / whole / whole, drafts


@triton.jit
def likeness_kernel(
    scores_ptr, target_ptr, wanted_ptr, heats_ptr, found_ptr, vocabulary, CROSS: tl.constexpr, MATCH: tl.constexpr,
    FOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    both, mine, its = tl.load(heats_ptr + row * 3), tl.load(heats_ptr + row * 3 + 1), tl.load(heats_ptr + row * 3 + 2)
    scores_ptr += row * vocabulary
    target_ptr += row * vocabulary
    place = tl.arange(0, BLOCK)
    best_s = -1e30 + both * 0
    best_t = best_s
    likeliest = row * 0
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
        if MATCH:
            likeliest = tl.where(high_t > best_t, start + tl.argmax(t, axis=0), likeliest)
            mine_s = mine_s * tl.exp((best_s - high_s) * mine) + tl.sum(tl.exp((s - high_s) * mine), axis=0)
            its_t = its_t * tl.exp((best_t - high_t) * its) + tl.sum(tl.exp((t - high_t) * its), axis=0)
        best_s, best_t = high_s, high_t
    found_ptr += row * FOUND
    if CROSS:
        log_both_s, log_both_t = best_s * both + tl.log(both_s), best_t * both + tl.log(both_t)
        tl.store(found_ptr, log_both_s - cross / both_t * both)
        tl.store(found_ptr + 3, log_both_s)
        tl.store(found_ptr + 4, log_both_t)
    if MATCH:
        log_mine, log_its = best_s * mine + tl.log(mine_s), best_t * its + tl.log(its_t)
        wanted = tl.load(wanted_ptr + row)
        # The likeliest token by its chance; another that came counts as one that was drawn.
        other = tl.where((wanted < vocabulary) & (wanted != likeliest), 1.0, 0.0)
        wanted = tl.minimum(wanted, vocabulary - 1)
        chance = tl.exp(best_t * its - log_its)
        match, ratio, steep, drafts = _match(
            scores_ptr, target_ptr, likeliest, mine, its, log_mine, log_its, chance, vocabulary, BLOCK
        )  # fmt: skip
        tl.store(found_ptr + 7, likeliest.to(tl.float32))
        tl.store(found_ptr + 8, ratio)
        tl.store(found_ptr + 9, steep)
        tl.store(found_ptr + 10, drafts)
        match_too, ratio, steep, drafts = _match(
            scores_ptr, target_ptr, wanted, mine, its, log_mine, log_its, other, vocabulary, BLOCK
        )  # fmt: skip
        tl.store(found_ptr + 11, wanted.to(tl.float32))
        tl.store(found_ptr + 12, ratio)
        tl.store(found_ptr + 13, steep)
        tl.store(found_ptr + 14, drafts)
        tl.store(found_ptr + 1, match + match_too)
        tl.store(found_ptr + 5, log_mine)
        tl.store(found_ptr + 6, log_its)


@triton.jit
def slope_kernel(
    scores_ptr, target_ptr, heats_ptr, found_ptr, weights_ptr, vocabulary, CROSS: tl.constexpr, MATCH: tl.constexpr,
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
    if MATCH:
        q, p = tl.exp(s * mine - tl.load(found_ptr + 5)), tl.exp(t * its - tl.load(found_ptr + 6))
        for part in tl.static_range(7, 15, 4):
            token = tl.load(found_ptr + part).to(tl.int32)
            steep, drafts = tl.load(found_ptr + part + 2), tl.load(found_ptr + part + 3)
            moved = q * tl.exp(tl.load(found_ptr + part + 1))
            moved = tl.where(moved > p, moved, 0.0)
            slope += alike * steep * tl.where(columns == token, -drafts, moved)
    tl.store(scores_ptr + columns, slope.to(scores_ptr.dtype.element_ty), mask=inside)


def likeness(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    wanted_R: torch.Tensor,
    heats_RC: torch.Tensor,
    *,
    cross: bool = True,
    match: bool = True,
) -> torch.Tensor:
    """[R, FOUND] float32; rows must lie one after another in memory, and `heats_RC` is float32 [R, HEATS]. What is not
    asked for is left 0: exponentials are what takes the time."""
    for part in (scores_RV, target_RV, wanted_R, heats_RC):
        assert part.is_contiguous()
    rows, vocabulary = scores_RV.shape
    found_RC = torch.zeros(rows, FOUND, device=scores_RV.device)
    likeness_kernel[(rows,)](
        scores_RV, target_RV, wanted_R, heats_RC, found_RC, vocabulary, CROSS=cross, MATCH=match, FOUND=FOUND,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return found_RC


def parts(
    found_RC: torch.Tensor, target_RV: torch.Tensor, heats_RC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of what `likeness` found with a match: the chance of a match with the likeliest token, that with another that
    came, and the likeliest one's own chance, [R] each."""
    likeliest_R1 = found_RC[:, _LIKELIEST, None].long()
    chance_R = (target_RV.gather(1, likeliest_R1)[:, 0].float() * heats_RC[:, 2] - found_RC[:, _LOG_ITS]).exp()
    # A match is a weight over a sum, its steepness the weight over the squared sum.
    best_R = (chance_R * found_RC[:, _STEEP[0]]).sqrt()
    return best_R, found_RC[:, _STEEP[1]].sqrt(), chance_R


def slope_(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    found_RC: torch.Tensor,
    weights_RC: torch.Tensor,
    wanted_R: torch.Tensor,
    *,
    cross: bool = True,
    match: bool = True,
) -> torch.Tensor:
    """The slope in the scores of: weights 0 times cross entropy times temperature, less weights 1 and 2 times the match
    with the likeliest token and with another. Takes the place of the scores."""
    rows, vocabulary = scores_RV.shape
    weighed_RC = found_RC.clone()
    for part, column in enumerate(_STEEP, 1):
        weighed_RC[:, column] *= weights_RC[:, part]
    kept_RC = torch.stack([weights_RC[:, 0], torch.ones_like(weights_RC[:, 0])], 1)
    slope_kernel[(rows, triton.cdiv(vocabulary, _BLOCK))](
        scores_RV, target_RV, heats_RC, weighed_RC, kept_RC, vocabulary, CROSS=cross, MATCH=match, FOUND=FOUND,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return scores_RV
