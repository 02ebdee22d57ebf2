"""Text that comes in pieces, read by generators that wait (`yield`) where a piece ends.

Every reader here consumes its text once, so the cost is linear, and decides only on text that is there, so the outcome
does not depend on where pieces end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from lowlat.text.tool_calls.json_scanner import JsonScanner
from lowlat.text.tool_calls.parts import MalformedError

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader: runs until it needs more text, and returns what it read."""

MAX_CALL_CHARACTERS = 2**20
"""A longer call is malformed."""


class TextSource:
    """What has come and is not consumed yet."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False
        self.taken: list[str] = []
        """What was consumed since the owner last emptied it: the raw text of a call that turns out malformed."""
        self.room = MAX_CALL_CHARACTERS

    def take(self, count: int) -> str:
        piece, self.rest = self.rest[:count], self.rest[count:]
        self.taken.append(piece)
        self.room -= count
        return piece

    def begin_call(self) -> None:
        self.taken = []
        self.room = MAX_CALL_CHARACTERS

    def wait(self) -> Steps[None]:
        """Until more text comes.

        Raises:
            MalformedError: none will come, or the call is too long.
        """
        if self.ended or self.room < 0:
            raise MalformedError
        yield


class Pump:
    """Runs a reader over text as it comes."""

    def __init__(self, read: Callable[[TextSource], Steps[None]]) -> None:
        self._source = TextSource()
        self._steps = read(self._source)
        self._done = False

    def push(self, text: str) -> None:
        if self._done or not text:
            return
        self._source.rest += text
        self._run()

    def finish(self) -> None:
        if self._done:
            return
        self._source.ended = True
        while not self._done:
            self._run()

    def _run(self) -> None:
        if next(self._steps, self) is self:
            self._done = True


def held_end(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may still grow into one of `markers`."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-size:]):
                longest = size
                break
    return longest


def first_of(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Where the first of `markers` stands (the longest of those at one place), and which; (-1, "") if none does."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker


def spaces(source: TextSource) -> Steps[None]:
    """Consume white space."""
    while True:
        source.take(len(source.rest) - len(source.rest.lstrip()))
        if source.rest or source.ended:
            return
        yield


def literal(source: TextSource, options: Sequence[str]) -> Steps[str]:
    """Consume the option that comes next, and return it; "" when none does."""
    while True:
        for option in options:
            if source.rest.startswith(option):
                source.take(len(option))
                return option
        if source.ended or not any(option.startswith(source.rest) for option in options):
            return ""
        yield


def expect(source: TextSource, *options: str) -> Steps[str]:
    """As `literal`, but raises MalformedError when none of the options comes."""
    found = yield from literal(source, options)
    if not found:
        raise MalformedError
    return found


def until(source: TextSource, marker: str, limit: int = MAX_CALL_CHARACTERS) -> Steps[str]:
    """Consume up to and with `marker`; returns what stood before it.

    Raises:
        MalformedError: the text ends, or more than `limit` characters come, before the marker.
    """
    pieces: list[str] = []
    size = 0
    while True:
        at = source.rest.find(marker)
        count = at if at >= 0 else len(source.rest) - held_end(source.rest, (marker,))
        size += count
        if size > limit:
            raise MalformedError
        pieces.append(source.take(count))
        if at >= 0:
            source.take(len(marker))
            return "".join(pieces)
        yield from source.wait()


def json_value(source: TextSource) -> Steps[str]:
    """Consume one JSON value (an object or an array), and return its text.

    Raises:
        MalformedError: as soon as a character cannot belong to one.
    """
    scanner = JsonScanner()
    pieces: list[str] = []
    while True:
        count = scanner.feed(source.rest)
        pieces.append(source.take(count))
        if scanner.complete:
            return "".join(pieces)
        if scanner.wrong:
            raise MalformedError
        yield from source.wait()
