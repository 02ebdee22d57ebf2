"""State rows of running requests: where the state of models that keep one is copied to when a page ends.

A later request that shares the prefix up to that page's end begins with the copy (decision 0603).
"""

from __future__ import annotations

from lowlat.cache.prefix import PrefixCache
from lowlat.cache.snapshots import Snapshots
from lowlat.engine.active import ActiveRequest
from lowlat.engine.batch import StepPlan


class StateRows:
    """Takes rows for steps that may end a page, and keeps those that turn out to be of use."""

    def __init__(self, snapshots: Snapshots, page_size: int) -> None:
        self._snapshots = snapshots
        self._page_size = page_size

    def for_chunk(self, active: ActiveRequest, plan: StepPlan, start: int, end: int) -> None:
        """Save the state where the prompt's last whole page ends, if the chunk from `start` to `end` gets there."""
        whole = active.prefill_end - active.prefill_end % self._page_size
        if start < whole <= end:
            row = self._snapshots.take()
            if row is not None:
                active.marks[whole] = row
                plan.saves.append((active.slot, row))

    def for_decode(self, active: ActiveRequest, plan: StepPlan) -> int:
        """A row to save a decoding request's state to, where this step may end a page; -1: none."""
        if active.width == 1 and active.launched % self._page_size:
            return -1
        row = self._snapshots.take()
        if row is None:
            return -1
        plan.saves.append((active.slot, row))
        return row

    def settle(self, active: ActiveRequest, row: int, count: int) -> None:
        """Learn whether a decode step of `count` tokens ended a page, and so whether its state was saved to `row`.

        The two newest are kept: the newest may lie beyond a token that turns out to be the last.
        """
        end = min(active.filled + count, active.end - 1) // self._page_size * self._page_size
        if active.ended or end <= active.filled:
            self._snapshots.give_back(row)
            return
        while len(active.marks) >= 2:
            self._snapshots.give_back(active.marks.pop(min(active.marks)))
        active.marks[end] = row

    def prompt_done(self, active: ActiveRequest, cache: PrefixCache) -> None:
        """The prompt's pages were shared just now: the state at the end of its last whole page goes with them."""
        row = self.at_end(active)
        if row >= 0:
            assert active.lease is not None
            cache.keep_state(active.lease, row)

    def at_end(self, active: ActiveRequest) -> int:
        """The row of the last whole page of what is computed, which the caller now owns; -1: none."""
        return active.marks.pop(active.filled - active.filled % self._page_size, -1)

    def give_back(self, active: ActiveRequest) -> None:
        """Free all rows that a request still has."""
        for row in active.marks.values():
            self._snapshots.give_back(row)
        active.marks = {}
