"""What the engine asks of a proposer: guesses of the tokens that come next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from lowlat.layers.step import Segment, StepInputs


class DraftRequest(msgspec.Struct, frozen=True):
    """One request to draft for: `anchor` is its newest token, at position `length`; `state` its batch slot.

    At most `most` guesses are of use.
    """

    anchor: int
    length: int
    state: int
    most: int = 16


class Proposal(msgspec.Struct, frozen=True):
    """Guesses of the tokens after an anchor, in order.

    `kind` tells apart guesses whose chances differ and are measured apart. `chances`, where the proposer knows them:
    of each guess being right if those before it were.
    """

    tokens: list[int] = []
    kind: int = 0
    chances: list[float] | None = None


class Proposer(Protocol):
    """One engine's source of guesses. Calls come from the thread that runs steps, in order."""

    costs_time: bool
    """Whether `propose` computes something that is worth leaving out."""
    sequential: bool
    """Whether every guess takes time of its own."""
    needs_ranks: bool
    """Whether `propose` talks to the other ranks, so that all must call it."""
    follows: bool
    """Whether `follow` does anything."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request with these tokens takes a batch slot."""

    def observe(self, slot: int, tokens: Iterable[int]) -> None:
        """These tokens were chosen next."""

    def follow(self, step: StepInputs) -> None:
        """The target has computed these rows; a draft with keys and values of its own computes them too."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Guesses for each request."""


class Tables(Protocol):
    """Where a batch slot's tokens lie in the KV pools: a draft's pools have the target's slots."""

    def segment(self, slot: int, rows: range, length: int) -> Segment:
        """Rows of a request whose last is token `length - 1`."""

    def write_slots(self, slot: int, start: int, count: int) -> np.ndarray:
        """KV slots of `count` tokens from `start` on."""


Choose = Callable[[torch.Tensor, int, int], int]
"""(logits [V], batch slot, position) to the draft's guess of the token there."""
