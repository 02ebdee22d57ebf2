"""Likeliest and drawn tokens of a few rows over a vocabulary, by the law of `layers/drawing.py`.

The vocabulary is cut into chunks, so that all multiprocessors read: one launch finds the chunks' best tokens, one the
best of those.

Legend of shape suffixes: M samples of a step, V vocabulary, C chunks, T batch slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.drawing import MIN_TEMPERATURE
from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

_CHUNK = 512
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _gumbel(seed, position, ids):
    """`drawing.gumbel`: 64-bit arithmetic without signs."""
    stream = _mix(seed.to(tl.uint64, bitcast=True) ^ _mix(position.to(tl.uint64, bitcast=True) + _GAMMA))
    value = _mix(stream + (ids.to(tl.uint64) + 1) * _GAMMA)
    uniform = ((value >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def best_kernel(
    logits_ptr, slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, ids_ptr, largest_ptr, score_ptr, where_ptr,
    vocabulary, chunks, SHARPNESS: tl.constexpr, DRAWS: tl.constexpr, IDS: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the best token of a chunk of a row, its score, and the largest logit; NaN where there is one."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    x = tl.load(logits_ptr + row * vocabulary + place, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    broken = tl.max((x != x).to(tl.int32), axis=0) > 0
    score = x.to(tl.float64)
    if DRAWS:
        slot = tl.load(slots_ptr + row)
        temperature = tl.load(temperatures_ptr + slot)
        if temperature >= _MIN_TEMPERATURE:
            ids = place
            if IDS:
                ids = tl.load(ids_ptr + place, mask=inside, other=0)
            noise = _gumbel(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), ids)
            score = score * SHARPNESS / temperature.to(tl.float64) + noise
    best = tl.max(score, axis=0)
    first = tl.min(tl.where((score == best) & inside, place, 2147483647), axis=0)
    tl.store(largest_ptr + row * chunks + chunk, tl.where(broken, float("nan"), largest))
    tl.store(score_ptr + row * chunks + chunk, best)
    tl.store(where_ptr + row * chunks + chunk, first)


@triton.jit
def finish_kernel(
    largest_ptr, score_ptr, where_ptr, tokens_ptr, chunks, BLOCK_C: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One program: the token of a row."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK_C)
    inside = place < chunks
    largest_c = tl.load(largest_ptr + row * chunks + place, mask=inside, other=float("-inf"))
    score_c = tl.load(score_ptr + row * chunks + place, mask=inside, other=float("-inf"))
    where_c = tl.load(where_ptr + row * chunks + place, mask=inside, other=2147483647)
    broken = tl.max((largest_c != largest_c).to(tl.int32), axis=0) > 0
    usable = (broken == 0) & (tl.abs(tl.max(largest_c, axis=0)) < float("inf"))
    best = tl.max(score_c, axis=0)
    token = tl.min(tl.where(score_c == best, where_c, 2147483647), axis=0)
    tl.store(tokens_ptr + row, tl.where(usable, token, -1).to(tl.int64))


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None = None,
    sharpness: float = 1.0,
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """As `drawing.draw`."""
    samples, vocabulary = logits_MV.shape
    assert logits_MV.is_contiguous()
    assert slots_M.is_contiguous()
    assert positions_M.is_contiguous()
    chunks = triton.cdiv(vocabulary, _CHUNK)
    device = logits_MV.device
    largest_MC = torch.empty(samples, chunks, dtype=torch.float32, device=device)
    score_MC = torch.empty(samples, chunks, dtype=torch.float64, device=device)
    where_MC = torch.empty(samples, chunks, dtype=torch.int32, device=device)
    tokens_M = torch.empty(samples, dtype=torch.int64, device=device)
    temperature_T, seed_T = (largest_MC, slots_M) if settings is None else settings
    options = {"EARLY": early_start, "num_warps": 4, **early.launch_options(early_start)}
    best_kernel[(samples, chunks)](
        logits_MV, slots_M, positions_M, temperature_T, seed_T, slots_M if ids_V is None else ids_V, largest_MC,
        score_MC, where_MC, vocabulary, chunks, SHARPNESS=sharpness, DRAWS=settings is not None, IDS=ids_V is not None,
        CHUNK=_CHUNK, **options,
    )  # fmt: skip
    block_c = triton.next_power_of_2(chunks)
    finish_kernel[(samples,)](largest_MC, score_MC, where_MC, tokens_M, chunks, BLOCK_C=block_c, **options)
    return tokens_M
