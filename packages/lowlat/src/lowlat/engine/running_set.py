"""Who has a batch slot and pages: requests that run, and those that ended while a step in flight may still write them.

A slot and its pages are free again after the last launched step that could write them, and not before.
"""

from __future__ import annotations

from bisect import insort

from lowlat.cache.prefix import Lease, PrefixCache
from lowlat.engine.active import ActiveRequest
from lowlat.engine.state_rows import StateRows


class RunningSet:
    """Requests with slots. Each slot and each private page has one owner at any time (`check`)."""

    def __init__(self, cache: PrefixCache, states: StateRows | None, max_batch: int) -> None:
        self.requests: list[ActiveRequest] = []
        """Those that run, in their order: who comes last is preempted first."""
        self.ending: list[ActiveRequest] = []
        """Those that have ended and wait for their last launched step."""
        self.free_slots = list(range(max_batch - 1, -1, -1))
        self._cache = cache
        self._states = states
        self._max_batch = max_batch

    def begin(self, active: ActiveRequest, lease: Lease) -> None:
        """Give a request its pages and a free slot; its counts are those of a request that was not computed since."""
        active.lease = lease
        active.slot = self.free_slots.pop()
        active.sent_pages = 0
        active.prefill_end = len(active.tokens)
        active.launched = active.filled = active.next_row(lease.start)
        active.launched_samples = len(active.tokens) - active.prompt_tokens
        insort(self.requests, active)

    def preempt(self) -> ActiveRequest:
        """Take slot and pages of the request that comes last, of which nothing is in flight; returns it."""
        victim = self.requests.pop()
        assert victim.in_flight == 0
        self._release(victim)
        return victim

    def end(self, active: ActiveRequest) -> None:
        """Free what a request that has ended holds, now or after its last launched step. It may not have begun."""
        if active.lease is None:
            self._forget(active, None)
            return
        self.requests.remove(active)
        if active.in_flight:
            self.ending.append(active)
        else:
            self._release(active)

    def release_ended(self, step: int) -> None:
        """Free what those held whose last launched step is over, now that `step` is."""
        ended = [active for active in self.ending if active.last_step <= step]
        self.ending = [active for active in self.ending if active.last_step > step]
        for active in ended:
            self._release(active)

    def _release(self, active: ActiveRequest) -> None:
        assert active.lease is not None
        shared = active.shared
        self._cache.end(active.lease, shared, -1 if self._states is None else self._states.at_end(active))
        if self._states is not None:
            self._states.give_back(active)
        active.lease = None
        self.free_slots.append(active.slot)
        active.slot = -1
        if active.ended:
            self._forget(active, shared or None)

    def _forget(self, active: ActiveRequest, computed: list[int] | None) -> None:
        """Let go of what a request has beside slot and pages; `computed` is what its session pins from now on."""
        if active.session is not None:
            self._cache.sessions.leave(active.session, computed)
        if active.grammar is not None:
            active.grammar.process.release()

    def check(self) -> None:
        """Assert that each page and slot has one owner, and that requests that run have pages for what is launched."""
        self._cache.check()
        holders = self.requests + self.ending
        assert sorted(self.free_slots + [active.slot for active in holders]) == list(range(self._max_batch))
        private = [page for active in holders if active.lease for page in active.lease.private]
        assert len(set(private)) == len(private) == self._cache.pool.held, "a page has two owners or none"
        for active in self.requests:
            assert active.lease is not None
            assert min(active.launched, active.places) <= len(active.lease.pages) * self._cache.page_size
            assert active.filled <= active.launched
