"""A small model of the same vocabulary as proposer, with keys and values in pools of its own at the target's slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from lowlat.cache.layout import KVPool
from lowlat.layers.step import StepInputs
from lowlat.speculative.proposer import Choose, DraftRequest, Proposal, Tables


class SmallModel(Protocol):
    """What is asked of the small model."""

    def states(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        """Last states of all rows; their keys and values are written."""

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Logits of rows."""


class ModelProposer:
    """Guesses token after token.

    It computes every row that the target computes, so what lies at a slot in its pools always belongs to the token
    that the target has there.
    """

    costs_time = True
    sequential = True
    needs_ranks = False
    follows = True

    def __init__(
        self, model: SmallModel, pool: KVPool, tables: Tables, *, min_rows: int, choose: Choose | None = None
    ) -> None:
        """`choose` None: guesses are the likeliest tokens."""
        self._model, self._pool, self._tables = model, pool, tables
        self._min_rows, self._choose = min_rows, choose

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Its keys and values come with the target's rows."""

    def observe(self, slot: int, tokens: Iterable[int]) -> None:
        """The same."""

    def follow(self, step: StepInputs) -> None:
        self._model.states(step, self._pool)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        guesses: list[list[int]] = [[] for _ in requests]
        for place in range(max(request.most for request in requests)):
            going = [index for index, request in enumerate(requests) if request.most > place]
            newest = [(requests[index], [requests[index].anchor, *guesses[index]][-1]) for index in going]
            logits_RV = self._model.logits(self._model.states(self._inputs(newest, place), self._pool)[: len(going)])
            for index, logits_V in zip(going, logits_RV, strict=True):
                request = requests[index]
                if self._choose is None:
                    guesses[index].append(int(logits_V.argmax()))
                else:
                    guesses[index].append(self._choose(logits_V, request.state, request.length + place + 1))
        return [Proposal(tokens) for tokens in guesses]

    def _inputs(self, newest: Sequence[tuple[DraftRequest, int]], place: int) -> StepInputs:
        """One row for each request: its newest token, `place` tokens after the anchor."""
        tokens = [token for _, token in newest]
        positions = [request.length + place for request, _ in newest]
        write = [self._tables.write_slots(of.state, position, 1) for (of, _), position in zip(newest, positions)]
        segments = [
            self._tables.segment(of.state, range(row, row + 1), position + 1)
            for row, ((of, _), position) in enumerate(zip(newest, positions))
        ]
        padding = [0] * max(0, self._min_rows - len(tokens))
        return StepInputs(
            tokens_R=torch.tensor(tokens + padding),
            positions_R=torch.tensor(positions + padding),
            write_slots=torch.from_numpy(np.concatenate(write)),
            real_rows=len(tokens),
            segments=segments,
            decodes=[],
            sample_rows=torch.empty(0, dtype=torch.int64),
        )
