"""Marks of named regions inside a step: CUDA events that a graph records too, or a clock on a CPU.

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
    """One instance of a region in one step: start and end in microseconds from the step's first mark, and depth."""

    name: str
    start_us: float
    end_us: float
    depth: int
    own_us: float
    """Without the regions inside it."""


class RegionRecorder:
    """Collects marks of one step after another.

    On CUDA the marks are events with timing; inside a captured graph they become nodes of it, so every replay stamps
    them anew. `begin_step` and `end_step` enclose what is run or captured; `spans` reads the last run.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[tuple[str, bool, Any]] = []
        """(region, whether it begins, stamp), in order."""
        self.enabled = True
        self._undo: list[Callable[[], None]] = []

    def _stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        import torch

        external = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin_step(self) -> None:
        """Forget the marks of the step before and stamp the beginning of a new one."""
        self._marks = []
        self._marks.append((OTHER, True, self._stamp()))

    def end_step(self) -> None:
        """Stamp the end of the step."""
        self._marks.append((OTHER, False, self._stamp()))

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark what runs inside as region `name`; regions nest."""
        if not self.enabled or not self._marks:
            yield
            return
        self._marks.append((name, True, self._stamp()))
        try:
            yield
        finally:
            self._marks.append((name, False, self._stamp()))

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Mark every call of `owner.attribute` as a region, until `unwrap`. The callable itself is left as it is."""
        original = getattr(owner, attribute)

        def marked(*arguments: Any, **keywords: Any) -> Any:
            with self.region(name):
                return original(*arguments, **keywords)

        setattr(owner, attribute, marked)
        self._undo.append(lambda: setattr(owner, attribute, original))

    def unwrap(self) -> None:
        """Undo every `wrap`, last first."""
        while self._undo:
            self._undo.pop()()

    def _times(self) -> list[float]:
        """Microseconds of every mark from the first."""
        first = self._marks[0][2]
        if not self._cuda:
            return [(stamp - first) / 1e3 for _, _, stamp in self._marks]
        self._marks[-1][2].synchronize()
        return [0.0] + [first.elapsed_time(stamp) * 1e3 for _, _, stamp in self._marks[1:]]

    def spans(self) -> list[Span]:
        """All regions of the last step, in order of their ends; the step itself comes last as `other` at depth 0."""
        times = self._times()
        found: list[Span] = []
        open_regions: list[tuple[str, float, float]] = []
        own: list[float] = []
        for (name, begins, _), at in zip(self._marks, times):
            if begins:
                open_regions.append((name, at, at))
                own.append(0.0)
                continue
            opened, start, _ = open_regions.pop()
            assert opened == name, "regions must close in the order in which they opened"
            inside = own.pop()
            found.append(Span(name, start, at, len(open_regions), at - start - inside))
            if own:
                own[-1] += at - start
        return found
