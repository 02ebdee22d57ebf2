"""Writes requests into plans: their prefill chunks, their decode rows, and the page-table entries that these need."""

from __future__ import annotations

from lowlat.cache.prefix import PrefixCache
from lowlat.cache.rules import PrefillRules
from lowlat.engine.active import ActiveRequest, Launch
from lowlat.engine.batch import PrefillChunk, StepPlan
from lowlat.engine.state_rows import StateRows


class StepWriter:
    """Writes one step after another; what it wrote of a request stands in the request's own counts."""

    def __init__(self, cache: PrefixCache, rules: PrefillRules, states: StateRows | None) -> None:
        self._cache = cache
        self._rules = rules
        self._states = states

    def add_decodes(self, decoding: list[ActiveRequest], plan: StepPlan, launch: Launch) -> None:
        """Write a decode row for each request, and rows for guesses where it takes some."""
        states = self._states
        launch.decodes = decoding
        for active in decoding:
            lease = active.lease
            assert lease is not None
            start = active.launched
            end = start + 1
            if active.width > 1:  # of guesses in flight, none may turn out right
                end = min(start + active.width, active.end)
                start = max(active.prefill_end, active.filled + active.in_flight)
            if active.sent_pages < len(lease.pages) or lease.window is not None:
                self._send_pages(active, plan, start, end)
            active.launched = end
            active.launched_samples += 1
            active.in_flight += 1
            active.last_step = plan.step
            launch.rows.append(-1 if states is None else states.for_decode(active, plan))
            plan.decodes.append(active.slot)

    def chunk_end(self, active: ActiveRequest, start: int, rows: int) -> int:
        """Where a prefill chunk from `start` of at most `rows` tokens ends; `start` when it must wait for more rows.

        What is left for the last chunk is enough for it, and where the model's state would not serve the prompt's last
        whole page otherwise, a chunk ends there.
        """
        total = len(active.tokens)
        end = min(total, start + rows)
        if active.score is not None and active.score.items:
            return active.score.end(start, end)
        if 0 < total - end < self._rules.last_chunk:
            end = max(start, total - self._rules.last_chunk)
        whole = total - total % self._cache.page_size
        if self._states is not None and start < whole < end and end - whole > self._rules.state_reach:
            end = whole
        return end

    def add_chunk(self, active: ActiveRequest, plan: StepPlan, launch: Launch, end: int) -> int:
        """Write the prefill chunk of a request that ends at `end`; returns how many tokens it has."""
        start, score = active.launched, active.score
        if end == start:
            return 0
        place = active.place(start)
        self._send_pages(active, plan, min(place, active.shareable), place + end - start)
        sampling = active.request.sampling
        sample = end == active.prefill_end and sampling.max_tokens > 0
        targets = active.targets(start, end)
        tokens = active.tokens[start:end]
        chunk = PrefillChunk(active.slot, place, tokens, sample, targets, sampling.prompt_logprobs or 0)
        if score is not None:
            chunk.read_rows, chunk.labels = score.take_rows(start, end)
            chunk.items = score.item_rows(start, end)
        plan.chunks.append(chunk)
        launch.chunks.append((active, end, chunk))
        active.scored = max(active.scored, min(end, active.prompt_tokens - 1))
        active.launched = active.next_row(end)
        active.launched_samples += sample
        active.in_flight += 1
        active.last_step = plan.step
        if self._states is not None:
            self._states.for_chunk(active, plan, start, end)
        return end - start

    def _send_pages(self, active: ActiveRequest, plan: StepPlan, start: int, end: int) -> None:
        """Tell the device the page-table entries that it does not know yet, for rows from position `start` to `end`."""
        assert active.lease is not None
        pages = active.lease.pages
        if active.sent_pages < len(pages):
            plan.pages.append((active.slot, active.sent_pages, pages[active.sent_pages :]))
            active.sent_pages = len(pages)
        if active.lease.window is not None:
            window_pages = self._cache.slide(active.lease, start, end)
            if window_pages is not None:
                plan.windows.append((active.slot, *window_pages))
