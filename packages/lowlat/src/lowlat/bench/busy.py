"""How busy a machine was otherwise while something was measured on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from lowlat.bench.results import Row

T = TypeVar("T")


class CpuShare:
    """How much of the wall-clock time of measurements this process really ran, by processor time."""

    def __init__(self) -> None:
        self._wall = self._processor = 0.0

    def __call__(self, measure: Callable[[], T]) -> T:
        """What `measure` returns; its time counts."""
        wall, processor = time.perf_counter(), time.process_time()
        found = measure()
        self._wall += time.perf_counter() - wall
        self._processor += time.process_time() - processor
        return found

    def of(self, threads: int) -> float:
        """Processor time over wall-clock time of `threads` threads; well below 1: the machine was busy otherwise."""
        return self._processor / (self._wall * threads) if self._wall else 0.0


BUSY_SHARE = 0.9
"""Below this others took so much of the time that a result says so."""


def busy_note(share: float) -> str:
    """What is added to the note of what was measured while the process ran `share` of the time."""
    return f"; busy machine: this process ran {share:.0%} of the time" if share < BUSY_SHARE else ""


def mark_busy(row: Row, share: float, say: Callable[[str], None]) -> None:
    """Say on a CPU's row how much of the time the process ran, and warn where others took a tenth or more."""
    row.details = {"cpu_share": round(share, 3)}
    row.note += busy_note(share)
    if share < BUSY_SHARE:
        say(f"{row.arm}: the machine was busy, this process ran {share:.0%} of the time")


def load_average() -> tuple[float, int]:
    """Threads that wanted to run in the last minute, on average (0 where that is not known), and the cores here."""
    return (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0), os.cpu_count() or 1


def load_note() -> str:
    """What a result says where more threads wanted to run in the last minute than the machine has cores."""
    load, cores = load_average()
    return f"busy machine: load average {load:.1f} on {cores} cores" if load > cores + 1 else ""
