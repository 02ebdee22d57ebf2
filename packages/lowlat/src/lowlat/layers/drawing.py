"""Drawing tokens on the device: counter-based random numbers, and the inversion of a distribution function.

The laws are those of `engine/sampler.py`; kernels for them are in `triton/drawing.py`.

Legend of shape suffixes: M samples of a step, V vocabulary, T batch slots.
"""

from __future__ import annotations

import torch

# As `engine.batch` has it: below this a temperature means greedy.
MIN_TEMPERATURE = 1e-5


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """A token for each row, int64; -1 where the logits hold NaN or no finite number. `positions_M`: places of the
    tokens. `settings`: temperatures and seeds by slot, [T]; None: the likeliest tokens."""
    best_M, tokens_M = logits_MV.max(dim=-1)
    if settings is not None:
        temperature_T, seed_T = settings
        temperature_M = temperature_T[slots_M]
        greedy_M = temperature_M < MIN_TEMPERATURE
        scaled_MV = (logits_MV.float() - best_M[:, None]) / torch.where(greedy_M, 1.0, temperature_M)[:, None]
        numbers_M = uniforms(seed_T[slots_M], positions_M)
        drawn_M = invert(scaled_MV.softmax(-1, dtype=torch.float64).cumsum(-1), numbers_M, None)
        tokens_M = torch.where(greedy_M, tokens_M, drawn_M)
    return torch.where(best_M.isfinite(), tokens_M, -1)


def invert(cumulative_MV: torch.Tensor, numbers_M: torch.Tensor, kept_M: torch.Tensor | None) -> torch.Tensor:
    """Where each row's distribution function passes its number, among the first `kept_M` places."""
    if kept_M is None:
        kept_M = torch.full_like(numbers_M, cumulative_MV.shape[-1], dtype=torch.int64)
    last_M = kept_M - 1
    total_M = cumulative_MV.gather(-1, last_M[:, None])[:, 0]
    index_M1 = torch.searchsorted(cumulative_MV, (numbers_M * total_M)[:, None], right=True)
    return index_M1[:, 0].minimum(last_M)


def uniforms(seed_M: torch.Tensor, position_M: torch.Tensor) -> torch.Tensor:
    """`sampler.uniform` of many, float64, bit for bit; seeds are 64-bit numbers as int64."""
    gamma = _signed(0x9E3779B97F4A7C15)
    value_M = _mix(seed_M + gamma)
    value_M = _mix(value_M + (position_M + 1) * gamma)
    return _shift(value_M, 11).double() * 2.0**-53


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
