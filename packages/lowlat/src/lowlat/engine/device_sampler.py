"""Choosing tokens on the device, all rows of a step at once, by the laws of `sampler` and `logit_rules`.

What comes out differs from them only where sums in another order round differently. Nothing is read by the host.

Legend of shape suffixes: M samples of a step, V vocabulary, C log-probabilities beside the chosen one's.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from lowlat.engine.batch import MIN_TEMPERATURE
from lowlat.engine.device_state import DeviceState
from lowlat.layers.device_step import DeviceOps
from lowlat.layers.drawing import gumbel


class SamplingMode(msgspec.Struct, frozen=True):
    """What the rows of a step need; each mode is a graph of its own, so that greedy steps pay for nothing."""

    draws: bool = False
    """Some row is not greedy."""
    filters: bool = False
    """Some row has top-k, top-p or min-p."""
    rules: bool = False
    """Some row has a bias, a penalty or banned tokens."""
    logprobs: int = -1
    """Log-probabilities wanted: -1 none, 0 the chosen tokens', n those of the n most likely too."""


class Samples(msgspec.Struct):
    """What a step chose, on the device."""

    tokens_M: torch.Tensor
    """int64; -1 where the logits hold NaN, or no finite number."""
    chosen_M: torch.Tensor | None = None
    """Log-probabilities of the chosen tokens, their ranks, and the most likely ones: present where the mode says."""
    ranks_M: torch.Tensor | None = None
    top_MC: torch.Tensor | None = None
    top_ids_MC: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Those present."""
        parts = (self.tokens_M, self.chosen_M, self.ranks_M, self.top_MC, self.top_ids_MC)
        return [part for part in parts if part is not None]

    def fetched(self, rows: int, fetch: Callable[[torch.Tensor], torch.Tensor]) -> Samples:
        """The first rows on their way to the host."""
        return Samples(*(fetch(part[:rows]) for part in self.tensors()))


def choose(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    state: DeviceState,
    mode: SamplingMode,
    ops: DeviceOps,
    guesses_BG: torch.Tensor | None = None,
) -> Samples:
    """Choose a token for each row of float32 `logits_MV`. `positions_M`: places of the chosen tokens, int64.

    `guesses_BG`: rows are those of B requests, G + 1 for each, and follow the guesses before them.
    """
    scores_MV = _ruled(logits_MV, slots_M, positions_M, state, guesses_BG) if mode.rules else logits_MV
    plain = not mode.rules and mode.logprobs < 0
    temperature_M = None
    if mode.draws and (mode.filters or not plain):
        temperature_M = state.temperature_T[slots_M]
        greedy_M = temperature_M < MIN_TEMPERATURE
        temperature_M = torch.where(greedy_M, 1.0, temperature_M)
        if mode.filters:
            settings = (state.top_k_T[slots_M], state.top_p_T[slots_M], state.min_p_T[slots_M])
            scores_MV = ops.keep_likely(scores_MV, temperature_M, *settings)
    if plain:
        drawing = (state.temperature_T, state.seed_T) if mode.draws else None
        return Samples(ops.draw(scores_MV, slots_M, positions_M, drawing))
    best_M, tokens_M = scores_MV.max(dim=-1)
    if temperature_M is not None:
        ids_V = torch.arange(scores_MV.shape[-1], device=scores_MV.device)
        drawn_MV = scores_MV.double() / temperature_M.double()[:, None]
        noise_MV = gumbel(state.seed_T[slots_M], positions_M, ids_V)
        tokens_M = torch.where(greedy_M, tokens_M, (drawn_MV + noise_MV).argmax(dim=-1))
    usable_M = (logits_MV.amax(dim=-1) if mode.rules else best_M).isfinite()
    samples = Samples(torch.where(usable_M, tokens_M, -1))
    if mode.logprobs >= 0:
        _add_logprobs(samples, logits_MV, tokens_M, mode.logprobs)
    return samples


def _ruled(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    state: DeviceState,
    guesses_BG: torch.Tensor | None,
) -> torch.Tensor:
    """As `LogitRules.apply`."""
    rules = state.rules
    assert rules is not None
    counts_MV = rules.counts_TV[slots_M]
    if guesses_BG is not None:
        counts_BWV = counts_MV.view(len(guesses_BG), -1, counts_MV.shape[-1])
        for place, guess_B1 in enumerate(guesses_BG.split(1, 1), start=1):  # type: ignore[no-untyped-call]
            later_BXV = counts_BWV[:, place:]
            index_BX1 = guess_B1[:, None].expand(-1, later_BXV.shape[1], -1)
            later_BXV.scatter_add_(-1, index_BX1, torch.ones_like(index_BX1, dtype=torch.int32))
    repetition_M1, presence_M1, frequency_M1 = rules.penalties_T3[slots_M].split(1, dim=-1)  # type: ignore[no-untyped-call]
    scores_MV = logits_MV + rules.bias_TV[slots_M]
    seen_MV = rules.prompt_TV[slots_M] | (counts_MV > 0)
    penalised_MV = torch.where(scores_MV > 0, scores_MV / repetition_M1, scores_MV * repetition_M1)
    scores_MV = torch.where(seen_MV, penalised_MV, scores_MV)
    scores_MV = scores_MV - torch.where(counts_MV > 0, frequency_M1 * counts_MV + presence_M1, 0.0)
    early_M1 = (positions_M < rules.banned_until_T[slots_M])[:, None]
    return scores_MV.masked_fill(rules.banned_TV[slots_M] & early_M1, float("-inf"))


def _add_logprobs(samples: Samples, logits_MV: torch.Tensor, tokens_M: torch.Tensor, count: int) -> None:
    """As `token_logprobs`, for every row."""
    total_M = logits_MV.logsumexp(-1)
    chosen_M = logits_MV.gather(-1, tokens_M[:, None])[:, 0]
    samples.chosen_M = chosen_M - total_M
    samples.ranks_M = (logits_MV > chosen_M[:, None]).sum(-1) + 1
    if count:
        top_MC, samples.top_ids_MC = logits_MV.topk(min(count, logits_MV.shape[-1]), dim=-1)
        samples.top_MC = top_MC - total_M[:, None]
