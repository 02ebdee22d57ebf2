"""Step plans from rank 0 to the other ranks, through shared memory: no socket and no pickle in a step.

The ring holds a few fixed-size records. Rank 0 writes a record, then its step number; a reader waits for the number,
reads, and acknowledges. Rank 0 never overwrites a record that some rank has not read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory

import numpy as np

RECORDS = 8
_CLOSED = -2
_SPINS = 2000
_SLEEP_S = 50e-6
_IDLE_AFTER_S = 1.0
_IDLE_SLEEP_S = 1e-3


class RingError(Exception):
    """The other side did not do its part in time, or is gone."""


class PlanRing:
    """One writer, `readers` readers, records of `words` 32-bit integers."""

    def __init__(self, words: int, readers: int, name: str | None = None) -> None:
        """Create the ring (`name` None) or open an existing one."""
        self._creator = name is None
        size = 8 * (RECORDS + readers) + 4 * words * RECORDS
        self._memory = shared_memory.SharedMemory(name=name, create=name is None, size=size)
        if name is not None:
            # Python's tracker would remove the creator's memory when this process ends.
            resource_tracker.unregister(self._memory._name, "shared_memory")  # type: ignore[attr-defined]
        memory = self._memory.buf
        assert memory is not None
        numbers = np.frombuffer(memory, dtype=np.int64, count=RECORDS + readers)
        self._written, self._read = numbers[:RECORDS], numbers[RECORDS:]
        records = np.frombuffer(memory, dtype=np.int32, offset=8 * (RECORDS + readers))
        self._records = records[: words * RECORDS].reshape(RECORDS, words)
        if self._creator:
            self._written[:] = -1
            self._read[:] = -1
        self._next = 0
        self._fence = threading.Lock()

    @property
    def name(self) -> str:
        """What readers open."""
        return self._memory.name

    def write(self, fill: Callable[[np.ndarray], None], deadline_s: float) -> None:
        """Let `fill` write the next record, and publish it.

        Raises `RingError` when a reader has not read the record that lies there after `deadline_s` seconds.
        """
        place = self._next % RECORDS
        end = time.monotonic() + deadline_s
        while int(self._read.min()) < self._next - RECORDS:
            if time.monotonic() > end:
                late = [rank + 1 for rank, read in enumerate(self._read) if read < self._next - RECORDS]
                raise RingError(f"ranks {late} did not read step {self._next - RECORDS} within {deadline_s:g} s")
            time.sleep(_SLEEP_S)
        fill(self._records[place])
        self._order()
        self._written[place] = self._next
        self._next += 1

    def read(self, reader: int, alive: Callable[[], bool]) -> np.ndarray | None:
        """A copy of the next record; None once the ring is closed. Raises `RingError` when `alive` says no."""
        place = self._next % RECORDS
        waiting_since = None
        spins = 0
        while (number := int(self._written[place])) != self._next:
            if number == _CLOSED:
                return None
            spins += 1
            if spins < _SPINS:
                continue
            now = time.monotonic()
            waiting_since = waiting_since or now
            idle = now - waiting_since > _IDLE_AFTER_S
            if idle and not alive():
                raise RingError("rank 0 is gone")
            time.sleep(_IDLE_SLEEP_S if idle else _SLEEP_S)
        self._order()
        record: np.ndarray = self._records[place].copy()
        self._order()
        self._read[reader] = self._next
        self._next += 1
        return record

    def close(self) -> None:
        """Tell readers to end (rank 0), and let go of the memory."""
        if self._creator:
            self._written[:] = _CLOSED
        del self._written, self._read, self._records
        self._memory.close()
        if self._creator:
            self._memory.unlink()

    def _order(self) -> None:
        # Taking a lock is a full memory barrier: a record must be visible before its number on every processor.
        with self._fence:
            pass
