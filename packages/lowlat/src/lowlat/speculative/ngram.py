"""Prompt lookup: what followed the last few tokens before will follow them again (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterable


class NgramProposer:
    """Proposes the continuation of the latest earlier occurrence of a request's last tokens.

    Suffixes of `longest` tokens are looked up first, then shorter ones down to `shortest`. How many tokens are proposed
    follows what was accepted: all of them accepted, and twice as many may come; otherwise one more than was accepted.
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"suffixes of {shortest} to {longest} tokens: the first must be at least 1 and no longer")
        self._sizes = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}
        """Suffix -> place of the token that followed its latest occurrence."""
        self._most = 1

    def observe(self, tokens: Iterable[int]) -> None:
        """Take note of the sequence's next tokens."""
        for token in tokens:
            place = len(self._tokens)
            for size in self._sizes:
                if place >= size:
                    self._followers[tuple(self._tokens[place - size :])] = place
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` guesses of what comes next; empty when nothing like the end was seen before."""
        count = min(count, self._most)
        for size in self._sizes:
            if count < 1 or len(self._tokens) < size:
                continue
            place = self._followers.get(tuple(self._tokens[-size:]))
            if place is not None:
                return self._continue(place, count)
        return []

    def judge(self, proposed: int, accepted: int) -> None:
        """Learn how many of the last proposal were accepted."""
        if proposed:
            self._most = 2 * proposed if accepted == proposed else accepted + 1

    def _continue(self, place: int, count: int) -> list[int]:
        # A repetition shorter than `count` runs into its own continuation.
        guesses: list[int] = []
        for source in range(place, place + count):
            known = source < len(self._tokens)
            guesses.append(self._tokens[source] if known else guesses[source - len(self._tokens)])
        return guesses
