"""The draft that a target brings with it (DeepSeek's DSpark): the target's forward feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lowlat.layers.step import StepInputs
from lowlat.speculative.proposer import DraftRequest, Proposal


class OwnDraft:
    """Asks the target; its caches keep what the draft needs."""

    costs_time = True
    sequential = False
    needs_ranks = True
    follows = False

    def __init__(self, ask: Callable[[list[DraftRequest]], list[Proposal]]) -> None:
        self._ask = ask

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """The target's caches begin by themselves."""

    def observe(self, slot: int, tokens: Iterable[int]) -> None:
        """The target's forward tells its draft."""

    def follow(self, step: StepInputs) -> None:
        """The same."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._ask(list(requests))
