"""How often guesses were right: of one request lately, and of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

_DECAY = 0.92
"""Of a request's past at every new judgement."""
_DECAY_ALL = 0.995
HOPEFUL = (1.4, 2.0)
"""Before anything is known: right, judged. For guesses that are only judged where they were asked for."""
DOUBTFUL = (0.5, 2.0)
"""For guesses that are judged whether they were worth a row or not."""
_PRIOR = 3.0
"""Judgements that all requests' past counts for in one request's."""


class _Counts:
    def __init__(self, right: float = 0.0, judged: float = 0.0) -> None:
        self.right, self.judged = right, judged

    def add(self, right: bool, decay: float) -> None:
        self.right = decay * self.right + right
        self.judged = decay * self.judged + 1


class Acceptance:
    """Chances of guesses, by kind and by place in the proposal, each given that the guesses before it were right."""

    def __init__(self, first: tuple[float, float] = HOPEFUL) -> None:
        self._all: dict[tuple[int, int], _Counts] = defaultdict(lambda: _Counts(*first))
        self._slots: dict[int, dict[tuple[int, int], _Counts]] = {}

    def begin(self, slot: int) -> None:
        """A new request takes a slot: it starts from what is known of all."""
        self._slots[slot] = defaultdict(_Counts)

    def chances(self, slot: int, kind: int, count: int) -> list[float]:
        """Of `count` guesses."""
        own = self._slots[slot]
        found = []
        for place in range(count):
            everyones, mine = self._all[kind, place], own[kind, place]
            prior = _PRIOR * everyones.right / everyones.judged
            found.append(min(1.0, (mine.right + prior) / (mine.judged + _PRIOR)))
        return found

    def judge(self, slot: int, kind: int, proposed: Sequence[int], chosen: Sequence[int]) -> None:
        """Compare a proposal with the tokens that came. Guesses that were not checked are judged too where the token at
        their place is known: so guesses that are not worth a row today are not forgotten."""
        for place, (guess, token) in enumerate(zip(proposed, chosen, strict=False)):
            self._all[kind, place].add(guess == token, _DECAY_ALL)
            self._slots[slot][kind, place].add(guess == token, _DECAY)
            if guess != token:
                break
