"""Progress on stderr while a model loads: a bar on a terminal, a plain line per phase elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class LoadProgress:
    """Call it with bytes done, bytes in all (0: unknown) and what is being done; use it as a context. Fewer than a MiB
    in all are no bytes but things of other kinds.

    Several threads may call it.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._printed_at = 0.0
        self._lock = threading.RLock()

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, done: int, total: int, what: str) -> None:
        with self._lock:
            if self._terminal:
                self._draw(done, total, what)
            else:
                self._print(done, total, what)
            self._phase = what

    def close(self) -> None:
        """Take the bar away; later calls bring it back."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = self._task = None
                self._phase = ""

    def _draw(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[size]}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        if self._task is None or what != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total or None, size="")
        size = f"{done} of {total}" if total else ""
        if total >= 2**20:
            size = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        self._bar.update(self._task, completed=done, total=total or None, size=size)

    def _print(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if what == self._phase and now - self._printed_at < 5:
            return
        self._printed_at = now
        # A phase's first line has no share: nothing may follow it, and "21 %" would then look like where it stopped.
        share = f" {100 * done // total} %" if total and done and what == self._phase else ""
        print(f"{what}{share}", file=sys.stderr, flush=True)
