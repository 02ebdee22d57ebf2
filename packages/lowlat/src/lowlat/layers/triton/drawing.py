"""Likeliest and drawn tokens of a few rows over a vocabulary, by the law of `layers/drawing.py`.

The vocabulary is cut into chunks, so that all multiprocessors read: one launch finds the chunks' largest logits, one
sums their weights in float64, one finds the token. A draw differs from the law only where float64 sums in another order
do.

Legend of shape suffixes: M samples of a step, V vocabulary, C chunks, T batch slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.drawing import MIN_TEMPERATURE

_CHUNK = 1024
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed, position):
    """`sampler.uniform`: 64-bit arithmetic without signs."""
    value = _mix(seed.to(tl.uint64, bitcast=True) + _GAMMA)
    value = _mix(value + (position.to(tl.uint64, bitcast=True) + 1) * _GAMMA)
    return (value >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def best_kernel(logits_ptr, best_ptr, where_ptr, vocabulary, chunks, CHUNK: tl.constexpr):
    """One program: the largest logit of a chunk of a row and its first place; NaN where there is one."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * vocabulary + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), axis=0) > 0
    best, where = tl.max(x, axis=0, return_indices=True)
    tl.store(best_ptr + row * chunks + chunk, tl.where(broken, float("nan"), best))
    tl.store(where_ptr + row * chunks + chunk, chunk * CHUNK + where)


@triton.jit
def _weights(x, best, temperature):
    """exp((x - best) / temperature): the quotient in float32, the power in float64, as the law has it."""
    return tl.exp(tl.div_rn(x - best, temperature).to(tl.float64))


@triton.jit
def mass_kernel(
    logits_ptr, best_ptr, mass_ptr, slots_ptr, temperatures_ptr, vocabulary, chunks, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: the sum of the weights of a chunk of a row that is drawn."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + tl.load(slots_ptr + row))
    if temperature >= _MIN_TEMPERATURE:
        place_c = tl.arange(0, BLOCK_C)
        best = tl.max(tl.load(best_ptr + row * chunks + place_c, mask=place_c < chunks, other=float("-inf")), axis=0)
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * vocabulary + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        tl.store(mass_ptr + row * chunks + chunk, tl.sum(_weights(x, best, temperature), axis=0))


@triton.jit
def finish_kernel(
    logits_ptr, best_ptr, where_ptr, mass_ptr, slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, tokens_ptr,
    vocabulary, chunks, DRAWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program: the token of a row."""
    row = tl.program_id(0).to(tl.int64)
    place_c = tl.arange(0, BLOCK_C)
    real_c = place_c < chunks
    best_c = tl.load(best_ptr + row * chunks + place_c, mask=real_c, other=float("-inf"))
    broken = tl.max((best_c != best_c).to(tl.int32), axis=0) > 0
    best, chunk = tl.max(best_c, axis=0, return_indices=True)
    chunk = tl.minimum(chunk, chunks - 1)  # among broken numbers it may be any
    usable = (broken == 0) & (tl.abs(best) < float("inf"))
    token = tl.load(where_ptr + row * chunks + chunk)
    if DRAWS:
        slot = tl.load(slots_ptr + row)
        temperature = tl.load(temperatures_ptr + slot)
        if (temperature >= _MIN_TEMPERATURE) & usable:
            mass_c = tl.load(mass_ptr + row * chunks + place_c, mask=real_c, other=0.0)
            cumulative_c = tl.cumsum(mass_c, axis=0)
            total = tl.sum(tl.where(place_c == chunks - 1, cumulative_c, 0.0), axis=0)
            number = _uniform(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)) * total
            passed_c = (cumulative_c <= number) & real_c
            chosen = tl.minimum(tl.sum(passed_c.to(tl.int32), axis=0), chunks - 1)
            before = tl.sum(tl.where(place_c == chosen - 1, cumulative_c, 0.0), axis=0)
            place = chosen * CHUNK + tl.arange(0, CHUNK)
            real = place < vocabulary
            x = tl.load(logits_ptr + row * vocabulary + place, mask=real, other=float("-inf")).to(tl.float32)
            within = tl.cumsum(_weights(x, best, temperature), axis=0)
            passed = ((before + within) <= number) & real
            token = chosen * CHUNK + tl.minimum(tl.sum(passed.to(tl.int32), axis=0), CHUNK - 1)
            token = tl.minimum(token, vocabulary - 1)
    tl.store(tokens_ptr + row, tl.where(usable, token, -1).to(tl.int64))


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """As `drawing.draw`."""
    samples, vocabulary = logits_MV.shape
    assert logits_MV.is_contiguous()
    assert slots_M.is_contiguous()
    assert positions_M.is_contiguous()
    chunks = triton.cdiv(vocabulary, _CHUNK)
    device = logits_MV.device
    best_MC = torch.empty(samples, chunks, dtype=torch.float32, device=device)
    where_MC = torch.empty(samples, chunks, dtype=torch.int32, device=device)
    tokens_M = torch.empty(samples, dtype=torch.int64, device=device)
    sizes = {"CHUNK": _CHUNK, "BLOCK_C": triton.next_power_of_2(chunks)}
    best_kernel[(samples, chunks)](logits_MV, best_MC, where_MC, vocabulary, chunks, CHUNK=_CHUNK, num_warps=4)
    mass_MC, temperature_T, seed_T = best_MC, best_MC, best_MC
    if settings is not None:
        temperature_T, seed_T = settings
        mass_MC = torch.empty(samples, chunks, dtype=torch.float64, device=device)
        mass_kernel[(samples, chunks)](
            logits_MV, best_MC, mass_MC, slots_M, temperature_T, vocabulary, chunks, **sizes, num_warps=4
        )
    finish_kernel[(samples,)](
        logits_MV, best_MC, where_MC, mass_MC, slots_M, positions_M, temperature_T, seed_T, tokens_M, vocabulary,
        chunks, DRAWS=settings is not None, **sizes, num_warps=4,
    )  # fmt: skip
    return tokens_M
