"""`filtering.keep_likely` without a sort: a search over the bits of a threshold, four at a time.

Scores become keys, 32-bit integers in the same order. Eight rounds find the key of the last token that top-k lets pass,
eight more that of top-p: each counts the tokens, and sums their mass, by the next four bits of those keys that agree
with the bits found so far. All programs share a row; partial sums are added in one order, so the same scores keep the
same tokens. Of equal keys the lower tokens are kept.

Legend of shape suffixes: M samples of a step, V vocabulary, C chunks, B = 16 bins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 512
_BITS = 4
_ROUNDS = 32 // _BITS


@triton.jit
def _scaled(scores_ptr, best_ptr, temperature_ptr, row, place, inside, vocabulary):
    x = tl.load(scores_ptr + row * vocabulary + place, mask=inside, other=float("-inf"))
    # The sum makes zero of minus zero, which is no less likely.
    return x, tl.div_rn(x - tl.load(best_ptr + row), tl.load(temperature_ptr + row)) + 0.0


@triton.jit
def _key(scaled):
    bits = scaled.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def _weight(key):
    """The mass of a token with this key."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, 0xFFFFFFFF - key)
    return tl.exp(bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=["shift"])
def count_kernel(
    scores_ptr, best_ptr, temperature_ptr, found_ptr, counts_ptr, masses_ptr, vocabulary, chunks, shift,
    BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: tokens of a chunk of a row, and their mass, by the next bits of keys with the bits found."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    _, scaled = _scaled(scores_ptr, best_ptr, temperature_ptr, row, place, inside, vocabulary)
    key = _key(scaled) >> shift
    bins = tl.arange(0, BINS)
    wanted = tl.load(found_ptr + row) * BINS + bins
    hit = (key[None, :] == wanted[:, None]) & inside[None, :]
    weight = tl.exp(scaled.to(tl.float64))
    at = (row * chunks + chunk) * BINS + bins
    tl.store(counts_ptr + at, tl.sum(hit.to(tl.int32), axis=1))
    tl.store(masses_ptr + at, tl.sum(tl.where(hit, weight[None, :], 0.0), axis=1))


@triton.jit
def pick_kernel(
    counts_ptr, masses_ptr, found_ptr, above_ptr, mass_ptr, ties_ptr, total_ptr, top_k_ptr, top_p_ptr,
    first_found_ptr, first_above_ptr, first_mass_ptr, first_ties_ptr, chunks,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: the next bits of a row's key, from the top the bin in which the count or the mass is reached."""
    row = tl.program_id(0).to(tl.int64)
    chunk, bins = tl.arange(0, BLOCK_C), tl.arange(0, BINS)
    at = (row * chunks + chunk[:, None]) * BINS + bins[None, :]
    inside = (chunk < chunks)[:, None]
    count_B = tl.sum(tl.load(counts_ptr + at, mask=inside, other=0).to(tl.int64), axis=0)
    mass_B = tl.sum(tl.load(masses_ptr + at, mask=inside, other=0.0), axis=0)
    higher = bins[:, None] > bins[None, :]
    count_above_B = tl.sum(tl.where(higher, count_B[:, None], 0), axis=0)
    mass_above_B = tl.sum(tl.where(higher, mass_B[:, None], 0.0), axis=0)
    above, mass = tl.load(above_ptr + row), tl.load(mass_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if BY_MASS:
        whole = tl.load(total_ptr + row)
        if top_k > 0:
            passed = tl.minimum(top_k - tl.load(first_above_ptr + row), tl.load(first_ties_ptr + row))
            whole = tl.load(first_mass_ptr + row) + passed.to(tl.float64) * _weight(tl.load(first_found_ptr + row))
        reached = mass + mass_above_B + mass_B >= tl.load(top_p_ptr + row) * whole
    else:
        reached = above + count_above_B + count_B >= top_k
        if FIRST:
            tl.store(total_ptr + row, tl.sum(mass_B, axis=0))
    # Where sums fall short by a rounding, the least likely tokens there are.
    chosen = tl.max(tl.where(reached & (count_B > 0), bins, -1), axis=0)
    least = tl.min(tl.where(count_B > 0, bins, BINS - 1), axis=0)
    chosen = tl.where(chosen < 0, least, chosen)
    here = bins == chosen
    tl.store(found_ptr + row, tl.load(found_ptr + row) * BINS + chosen)
    tl.store(above_ptr + row, above + tl.sum(tl.where(here, count_above_B, 0), axis=0))
    tl.store(mass_ptr + row, mass + tl.sum(tl.where(here, mass_above_B, 0.0), axis=0))
    tl.store(ties_ptr + row, tl.sum(tl.where(here, count_B, 0), axis=0))


@triton.jit
def ties_kernel(
    scores_ptr, best_ptr, temperature_ptr, k_found_ptr, p_found_ptr, ties_ptr, vocabulary, chunks, CHUNK: tl.constexpr
):  # fmt: skip
    """One program: how many tokens of a chunk have the keys found."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    _, scaled = _scaled(scores_ptr, best_ptr, temperature_ptr, row, place, inside, vocabulary)
    key = _key(scaled)
    at = (row * chunks + chunk) * 2
    tl.store(ties_ptr + at, tl.sum(((key == tl.load(k_found_ptr + row)) & inside).to(tl.int32), axis=0))
    tl.store(ties_ptr + at + 1, tl.sum(((key == tl.load(p_found_ptr + row)) & inside).to(tl.int32), axis=0))


@triton.jit
def keep_kernel(
    scores_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, total_ptr, k_found_ptr, k_above_ptr,
    k_mass_ptr, k_ties_ptr, p_found_ptr, p_mass_ptr, ties_ptr, out_ptr, vocabulary, chunks,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of a row, with minus infinity where a token may not be drawn. NaN stays."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    x, scaled = _scaled(scores_ptr, best_ptr, temperature_ptr, row, place, inside, vocabulary)
    key, others = _key(scaled), tl.arange(0, BLOCK_C)
    before = (row * chunks + others) * 2
    earlier = others < chunk
    keep = inside
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    whole = tl.load(total_ptr + row)
    if top_k > 0:
        found = tl.load(k_found_ptr + row)
        passed = top_k - tl.load(k_above_ptr + row)
        tie = (key == found) & inside
        rank = tl.cumsum(tie.to(tl.int32), axis=0) + tl.sum(tl.load(ties_ptr + before, mask=earlier, other=0), axis=0)
        keep = keep & ((key > found) | (tie & (rank <= passed)))
        ties = tl.minimum(passed, tl.load(k_ties_ptr + row))
        whole = tl.load(k_mass_ptr + row) + ties.to(tl.float64) * _weight(found)
    if top_p < 1.0:
        found = tl.load(p_found_ptr + row)
        missing = (top_p * whole - tl.load(p_mass_ptr + row)) / tl.maximum(_weight(found), 1e-300)
        tie = (key == found) & inside
        rank = tl.cumsum(tie.to(tl.int32), axis=0) + tl.sum(
            tl.load(ties_ptr + before + 1, mask=earlier, other=0), axis=0
        )
        # The tie that reaches the mass still passes, and the first of them always does.
        keep = keep & ((key > found) | (tie & ((rank - 1).to(tl.float64) < tl.maximum(missing, 1e-300))))
    if min_p > 0.0:
        keep = keep & (tl.exp(scaled.to(tl.float64)) >= min_p)
    out = tl.where(keep | (x != x), x, float("-inf"))
    tl.store(out_ptr + row * vocabulary + place, out, mask=inside)


def keep_likely(
    scores_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
    min_p_M: torch.Tensor,
) -> torch.Tensor:
    """As `filtering.keep_likely`."""
    samples, vocabulary = scores_MV.shape
    scores_MV, device = scores_MV.contiguous(), scores_MV.device
    best_M, out_MV = scores_MV.amax(dim=-1), torch.empty_like(scores_MV)
    chunks, bins = triton.cdiv(vocabulary, _CHUNK), 1 << _BITS
    block_c, grid = triton.next_power_of_2(chunks), (samples, chunks)
    counts_MCB = torch.empty(samples, chunks, bins, dtype=torch.int32, device=device)
    masses_MCB = torch.empty(samples, chunks, bins, dtype=torch.float64, device=device)
    ties_MC2 = torch.empty(samples, chunks, 2, dtype=torch.int32, device=device)
    # Of top-k and of top-p: bits found, tokens above, tokens with the key itself.
    k_found_M, k_above_M, k_ties_M, p_found_M, p_above_M, p_ties_M = torch.zeros(
        6, samples, dtype=torch.int64, device=device
    )
    k_mass_M, p_mass_M, total_M = torch.zeros(3, samples, dtype=torch.float64, device=device)
    rows = (scores_MV, best_M, temperature_M)
    first = (k_found_M, k_above_M, k_mass_M, k_ties_M)
    for by_mass, (found_M, above_M, mass_M, own_M) in enumerate((first, (p_found_M, p_above_M, p_mass_M, p_ties_M))):
        for turn in range(_ROUNDS):
            count_kernel[grid](
                *rows, found_M, counts_MCB, masses_MCB, vocabulary, chunks, 32 - _BITS * (turn + 1),
                BINS=bins, CHUNK=_CHUNK, num_warps=8,
            )  # fmt: skip
            pick_kernel[(samples,)](
                counts_MCB, masses_MCB, found_M, above_M, mass_M, own_M, total_M, top_k_M, top_p_M, *first, chunks,
                BY_MASS=bool(by_mass), FIRST=turn == 0, BINS=bins, BLOCK_C=block_c, num_warps=8,
            )  # fmt: skip
    ties_kernel[grid](*rows, k_found_M, p_found_M, ties_MC2, vocabulary, chunks, CHUNK=_CHUNK, num_warps=4)
    keep_kernel[grid](
        *rows, top_k_M, top_p_M, min_p_M, total_M, *first, p_found_M, p_mass_M, ties_MC2, out_MV, vocabulary, chunks,
        CHUNK=_CHUNK, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return out_MV
