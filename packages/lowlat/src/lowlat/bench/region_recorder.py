"""Marks of named regions inside a step.

The time between two neighbouring marks belongs to the innermost region open there, so regions never count twice and
their sum is the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

OTHER = "other"


class Span(msgspec.Struct, frozen=True):
    """One instance of a region in one step: start and end in microseconds from the step's beginning, and depth."""

    name: str
    start_us: float
    end_us: float
    depth: int
    own_us: float
    """Without the regions inside it."""


class Marks:
    """Where regions begin and end, and callables that are regions for a while."""

    def __init__(self) -> None:
        self.enabled = True
        self._undo: list[Callable[[], None]] = []
        self._wrapped: list[str] = []
        """Regions of calls under way, innermost last."""
        self._whole = 0
        """Of these, those whose calls are not told apart."""

    def region(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark what runs inside as region `name`; regions nest."""
        raise NotImplementedError

    def wrap(self, owner: Any, attribute: str, name: str | Callable[..., str], *, whole: bool = False) -> None:
        """Mark every call of `owner.attribute` as a region, until `unwrap`. The callable itself is left as it is.

        `name`: the region's, or what makes it of the call's arguments. Directly inside a region of the same name a call
        is part of that. `whole`: so is every call inside this one.
        """
        original = getattr(owner, attribute)

        def marked(*arguments: Any, **keywords: Any) -> Any:
            region = name if isinstance(name, str) else name(*arguments, **keywords)
            if self._whole or (self._wrapped and self._wrapped[-1] == region):
                return original(*arguments, **keywords)
            self._wrapped.append(region)
            self._whole += whole
            try:
                with self.region(region):
                    return original(*arguments, **keywords)
            finally:
                self._wrapped.pop()
                self._whole -= whole

        setattr(owner, attribute, marked)
        self._undo.append(lambda: setattr(owner, attribute, original))

    def unwrap(self) -> None:
        """Undo every `wrap`, last first."""
        while self._undo:
            self._undo.pop()()


class RegionRecorder(Marks):
    """Marks are times of a clock: for CPUs. `begin_step` and `end_step` enclose what runs; `spans` reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[str, bool, int]] = []
        """(region, whether it begins, nanoseconds), in order."""

    def begin_step(self) -> None:
        """Forget the marks of the step before and stamp the beginning of a new one."""
        self._marks = [(OTHER, True, time.perf_counter_ns())]

    def end_step(self) -> None:
        """Stamp the end of the step."""
        self._marks.append((OTHER, False, time.perf_counter_ns()))

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark what runs inside as region `name`; regions nest."""
        if not self.enabled or not self._marks:
            yield
            return
        self._marks.append((name, True, time.perf_counter_ns()))
        try:
            yield
        finally:
            self._marks.append((name, False, time.perf_counter_ns()))

    def spans(self) -> list[Span]:
        """All regions of the last step, in order of their ends; the step itself comes last as `other` at depth 0."""
        found: list[Span] = []
        open_regions: list[tuple[str, float]] = []
        own: list[float] = []
        first = self._marks[0][2]
        for name, begins, stamp in self._marks:
            at = (stamp - first) / 1e3
            if begins:
                open_regions.append((name, at))
                own.append(0.0)
                continue
            opened, start = open_regions.pop()
            assert opened == name, "regions must close in the order in which they opened"
            inside = own.pop()
            found.append(Span(name, start, at, len(open_regions), at - start - inside))
            if own:
                own[-1] += at - start
        return found
