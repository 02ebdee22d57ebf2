"""The scheduler: decides what each step computes, and takes in what each step found out.

`schedule` may run ahead of `commit`: a step is planned before the tokens of the steps in flight are known, because a
decode row needs only the position, which is known, and the token, which stays on the device. So the end of a request is
noticed late; its slot and pages are freed after the last launched step that could still write them.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque

from lowlat.cache.pages import OutOfPagesError
from lowlat.cache.prefix import Lease, PrefixCache
from lowlat.cache.rules import PrefillRules
from lowlat.engine.active import ActiveRequest, Launch
from lowlat.engine.answer import extend_answer
from lowlat.engine.batch import PlanLimits, Replay, StepPlan
from lowlat.engine.executor import StepResult
from lowlat.engine.prefix_waits import comes_soon
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from lowlat.engine.running_set import RunningSet
from lowlat.engine.score_task import begin_score
from lowlat.engine.state_rows import StateRows
from lowlat.engine.stats import EngineStats
from lowlat.engine.step_writer import StepWriter
from lowlat.grammars.matcher import GrammarLine

_SEED_MULTIPLIER = 0x9E3779B97F4A7C15


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache, priorities and preemption.

    Preconditions of `add`, which doors check: prompt not empty, prompt + max_tokens within `max_context`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        limits: PlanLimits,
        *,
        eos_ids: frozenset[int],
        chunk_tokens: int,
        seed: int,
        width: int = 1,
        rules: PrefillRules | None = None,
    ) -> None:
        """`width`: most rows of a request in a decode step, more than one where steps check guesses. `rules`: what the
        model asks of chunks; `chunk_tokens` must be at least its `last_chunk`."""
        self.cache = cache
        self.limits = limits
        self.eos_ids = eos_ids
        self.chunk_tokens = chunk_tokens
        self.width = width
        self.rules = rules or PrefillRules()
        self._states = None if cache.snapshots is None else StateRows(cache.snapshots, cache.page_size)
        self._writer = StepWriter(cache, self.rules, self._states)
        self.stats = EngineStats(pages_total=cache.pool.total)
        self._seed = seed
        self._arrivals = itertools.count()
        self._live: dict[str, ActiveRequest] = {}
        self._waiting: list[ActiveRequest] = []
        self._running = RunningSet(cache, self._states, limits.max_batch)
        self._launches: deque[Launch] = deque()
        self._step = 0
        self._outputs: list[RequestOutput] = []

    # --- what comes in ---------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, grammar: GrammarLine | None = None) -> None:
        """Queue a request. Raises `ValueError` when its id is live or it could never run.

        `grammar`: the line to the process of its grammar; it is released when the request is gone.
        """
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is already in use")
        limit = min(self.limits.max_pages * self.cache.page_size, self.cache.pool.total * self.cache.page_size)
        score, sampling, tokens = None, request.sampling, len(request.prompt_ids)
        if request.score is not None:
            score = begin_score(request.score, tokens, sampling.max_tokens, self.chunk_tokens, self.cache.windows)
        size = tokens + sampling.max_tokens if score is None else score.places
        if not tokens or sampling.max_tokens < 0 or size > limit:
            raise ValueError(
                f"prompt of {tokens} tokens with max_tokens {sampling.max_tokens}: "
                f"the prompt must have a token, and both together at most {limit}"
            )
        arrival = next(self._arrivals)
        seed = sampling.seed if sampling.seed is not None else (self._seed + arrival + 1) * _SEED_MULTIPLIER
        stops = frozenset(sampling.stop_token_ids)
        active = ActiveRequest(
            request,
            (-request.priority, arrival),
            seed & 0xFFFFFFFFFFFFFFFF,
            # A whole answer to a grammar ends, whatever else was asked for.
            stops if sampling.ignore_eos and grammar is None else stops | self.eos_ids,
            self.width,
            score,
            grammar,
        )
        if request.session_id:
            active.session = self.cache.sessions.join(request.session_id, request.cache_salt, request.session_ttl)
        self._live[request.id] = active
        heapq.heappush(self._waiting, active)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request early; false when it is not live (any more)."""
        active = self._live.get(request_id)
        if active is None:
            return False
        self._finish(active, RequestOutput(request_id, [], None, reason))
        self.stats.aborted += reason == FinishReason.ABORT
        return True

    # --- what goes out ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting, running or in flight."""
        return bool(self._live or self._launches)

    @property
    def has_requests(self) -> bool:
        """Whether anything is waiting or running; steps may be in flight without."""
        return bool(self._live)

    @property
    def in_flight(self) -> int:
        """Launched steps whose results are not committed."""
        return len(self._launches)

    def take_outputs(self) -> list[RequestOutput]:
        """Outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do before a step in flight is committed."""
        self.cache.sessions.expire()
        if not self._make_room():
            return None
        decoding = self._decoding()
        if decoding is None:
            return None
        plan = StepPlan(self._step, [], [], [], [])
        launch = Launch(self._step)
        self._writer.add_decodes(decoding, plan, launch)
        rows = self.chunk_tokens
        for active in self._running.requests:
            if active.launched < active.prefill_end and rows > 0:
                end = self._writer.chunk_end(active, active.launched, rows)
                rows -= self._writer.add_chunk(active, plan, launch, end)
        if self._waiting and rows > 0:
            self._admit(plan, launch, rows)
        if not launch.chunks and not launch.decodes:
            return None
        self._launches.append(launch)
        self._step += 1
        return plan

    def commit(self, result: StepResult) -> None:
        """Take in the result of the oldest step in flight."""
        launch = self._launches.popleft()
        if launch.step != result.step:
            raise ValueError(f"result of step {result.step}, expected {launch.step}")
        counts, bad_slots = result.counts, result.bad_slots
        sample = first = 0
        scores, labels = iter(result.prompt_logprobs or []), iter(result.label_logprobs or [])
        for active, filled, chunk in launch.chunks:
            active.in_flight -= 1
            end = first + (counts[sample] if counts and chunk.sample else 1)
            chunk_scores = next(scores) if chunk.targets else None
            label_logprobs = next(labels) if chunk.read_rows else None
            if active.slot in bad_slots:
                self._fail(active)
            elif not active.ended:
                self._take_chunk(active, filled, chunk_scores, label_logprobs)
                if chunk.sample:
                    self._take_sample(active, result, sample, first, end)
            else:
                active.filled = max(active.filled, filled)  # computed all the same: later requests find it
            if chunk.sample:
                first, sample = end, sample + 1
        for active, row in zip(launch.decodes, launch.rows, strict=True):
            active.in_flight -= 1
            count = counts[sample] if counts else 1
            end = first + count
            if row >= 0:
                assert self._states is not None
                self._states.settle(active, row, count)
            if bad_slots and active.slot in bad_slots:
                self._fail(active)
            elif not active.ended:
                self._take_sample(active, result, sample, first, end)
                if active.width > 1:
                    active.launched = min(active.filled + active.in_flight * active.width, active.end)
            first, sample = end, sample + 1
        self.stats.step += 1
        self.stats.guessed_tokens += result.guessed
        self.stats.accepted_tokens += sum(max(0, count - 1) for count in counts) if counts else 0
        if result.plain:
            self.stats.decode_rows += len(launch.decodes)
            self.stats.decode_tokens += len(result.tokens)
            self.stats.decode_seconds += result.spent
            self.stats.plain_seconds += result.plain
        if self._running.ending:
            self._running.release_ended(result.step)

    def refresh_stats(self) -> EngineStats:
        """The current gauges and counters (one object, updated in place)."""
        stats, pool = self.stats, self.cache.pool
        stats.running = len(self._running.requests)
        stats.waiting = len(self._live) - stats.running
        stats.pages_free, stats.pages_cached, stats.pages_held = pool.free, pool.cached, pool.held
        if (windows := self.cache.windows) is not None:
            stats.window_pages_free, stats.window_pages_held = windows.free, windows.in_use
            stats.window_pages_cached = windows.total - windows.free - windows.in_use
        sessions = self.cache.sessions
        sessions.expire()
        stats.sessions, stats.pages_pinned = sessions.pinned, self.cache.tree.pinned_pages
        stats.session_pins_lost = list(sessions.lost.items())
        return stats

    # --- planning --------------------------------------------------------------------------------------------------

    def _first_waiting(self) -> ActiveRequest | None:
        """Who is admitted next; those that ended while they waited are forgotten."""
        while self._waiting and self._waiting[0].ended:
            heapq.heappop(self._waiting)
        return self._waiting[0] if self._waiting else None

    def _make_room(self) -> bool:
        """Preempt for a waiting request of higher priority; false when steps in flight must end before."""
        head = self._first_waiting()
        if head is None:
            return True
        running = self._running.requests
        while running and running[-1].order[0] > head.order[0] and self._blocked(head):
            if self._launches:
                return False
            self._preempt()
        return True

    def _blocked(self, waiting: ActiveRequest) -> bool:
        """Whether slots or pages are too few to admit `waiting` now, even if sessions give up their pins."""
        if not self._running.free_slots:
            return True
        lease = self._lease(waiting)
        blocked = not self.cache.make_room(lease, waiting.places)
        self.cache.end(lease, [])
        return blocked

    def _lease(self, active: ActiveRequest) -> Lease:
        """Begin a lease for a waiting request; prompt tokens that are still to be scored cannot come from the cache."""
        reuse = active.scored >= active.prompt_tokens - 1
        tokens = active.tokens if active.score is None else active.tokens[: active.score.reusable]
        reach = 0 if active.score is None else active.score.places - active.score.query
        return self.cache.begin(tokens, active.request.cache_salt, reuse=reuse, reach=reach)

    def _decoding(self) -> list[ActiveRequest] | None:
        """Requests that get a decode row, each with a page for it; None to wait for a step in flight.

        When pages run out, requests are preempted from the end of the running list, so never one that has its page.
        """
        page_size, running = self.cache.page_size, self._running.requests
        decoding: list[ActiveRequest] = []
        index = 0
        while index < len(running):
            active = running[index]
            index += 1
            if active.launched < active.prefill_end or active.launched_samples >= active.request.sampling.max_tokens:
                continue
            assert active.lease is not None
            needed = min(active.launched + active.width, active.end)
            while needed > len(active.lease.pages) * page_size:
                try:
                    self.cache.extend(active.lease, needed)
                except OutOfPagesError:
                    if self._launches:
                        return None
                    if self._preempt() is active:
                        return decoding
            decoding.append(active)
        return decoding

    def _admit(self, plan: StepPlan, launch: Launch, rows: int) -> None:
        """Start waiting requests while there are slots, pages for their whole prompts, and rows in this step."""
        page_budget = self.limits.page_budget - sum(len(pages) for _, _, pages in plan.pages)
        held: list[ActiveRequest] = []
        running = self._running
        while running.free_slots and rows > 0 and (active := self._first_waiting()) is not None:
            lease = self._lease(active)
            computing = itertools.chain(running.requests, running.ending)
            if comes_soon(active, lease.cached_tokens, computing, self.cache):
                self.cache.end(lease, [])
                held.append(heapq.heappop(self._waiting))
                continue
            missing = self.cache.missing(lease, active.places)
            start = active.next_row(lease.start)
            end = self._writer.chunk_end(active, start, rows)
            # While something runs, pages come back without taking a session's.
            idle = not running.requests and not running.ending
            fits = (self.cache.make_room if idle else self.cache.fits)(lease, active.places)
            if not fits or len(lease.pages) + missing > page_budget or end == start:
                self.cache.end(lease, [])
                break
            self.cache.extend(lease, active.places)
            page_budget -= len(lease.pages)
            heapq.heappop(self._waiting)
            self._start(active, lease)
            plan.begins.append((active.slot, active.slot_sampling()))
            if lease.restore >= 0:
                plan.restores.append((lease.restore, active.slot))
            if lease.replayed:
                before = active.tokens[max(0, start - self.rules.replay_history) : start]
                plan.replays.append(Replay(active.slot, start, lease.cached_tokens, before))
            rows -= self._writer.add_chunk(active, plan, launch, end)
        for active in held:
            heapq.heappush(self._waiting, active)

    def _start(self, active: ActiveRequest, lease: Lease) -> None:
        """Give an admitted request its slot, and count it where it begins for the first time."""
        self._running.begin(active, lease)
        if active.cached_tokens < 0:
            active.cached_tokens = lease.cached_tokens
            active.queue_s = max(0.0, time.monotonic() - active.request.arrival) if active.request.arrival else 0.0
            self.stats.prompt_tokens += active.prompt_tokens
            self.stats.cached_tokens += lease.cached_tokens

    def _preempt(self) -> ActiveRequest:
        """Take slot and pages of the request that comes last; it waits again, at its old place in the order."""
        victim = self._running.preempt()
        self.stats.preemptions += 1
        heapq.heappush(self._waiting, victim)
        return victim

    # --- results ---------------------------------------------------------------------------------------------------

    def _take_chunk(
        self,
        active: ActiveRequest,
        filled: int,
        scores: list[TokenLogprobs] | None,
        label_logprobs: list[list[float]] | None,
    ) -> None:
        before, active.filled = active.filled, filled
        done = filled == active.prefill_end
        if done or (active.score is not None and before < active.score.query <= filled):
            assert active.lease is not None
            self.cache.share(active.lease, active.shared)
        if done and self._states is not None:
            self._states.prompt_done(active, self.cache)
        only_scores = done and active.request.sampling.max_tokens == 0
        if scores is None and label_logprobs is None and not only_scores:
            return
        output = RequestOutput(
            active.request.id,
            [],
            cached_tokens=active.cached_tokens,
            prompt_logprobs=scores,
            queue_s=active.queue_s,
            scores=label_logprobs,
        )
        if only_scores:
            output.finish_reason = FinishReason.LENGTH
            self.stats.finished += 1
            self._finish(active, output)
        else:
            self._outputs.append(output)

    def _take_sample(self, active: ActiveRequest, result: StepResult, sample: int, first: int, end: int) -> None:
        """Take in a sample of a step, its tokens from number `first` to `end`, up to where the answer ends."""
        output = extend_answer(active, result, sample, first, end)
        self.stats.generated_tokens += len(output.token_ids)
        if output.finish_reason is None:
            self._outputs.append(output)
        else:
            self.stats.finished += 1
            self._finish(active, output)

    def _fail(self, active: ActiveRequest) -> None:
        """End one request whose logits were not numbers; the others of its step go on."""
        active.spoiled = True  # what it computed may hold NaN, which every later request of this prefix would meet
        if active.ended:
            return
        self.stats.bad_logits += 1
        cause = "the model's logits for this request contain NaN: the weights, or the kernels, are broken for it"
        self._finish(active, RequestOutput(active.request.id, [], None, FinishReason.ERROR, error=cause))

    def _finish(self, active: ActiveRequest, output: RequestOutput) -> None:
        """Say the last word on a request and free what it has, now or after its last launched step."""
        self._outputs.append(output)
        active.ended = True
        del self._live[active.request.id]
        self._running.end(active)

    def check(self) -> None:
        """Assert that each page and slot has one owner, and that none is free while a launched step may write it."""
        self._running.check()
