"""Whatever happens, every page and slot is accounted for and every answer equals its solo run."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_simulator import make_core, make_request, solo_answer

from lowlat.engine.request import FinishReason, GenerateRequest


class Events:
    """Drives an engine by single events, with results as late as they come, and judges every ending."""

    def __init__(self, **shape: int) -> None:
        self.core, self.device = make_core(**shape)
        self.scheduler = self.core.scheduler
        self.live: dict[str, GenerateRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        self.count = 0
        self.finished = 0

    def submit(self, prompt: list[int], max_tokens: int, priority: int = 0, scored: bool = False) -> None:
        prompt_logprobs = 0 if scored else None
        self.take(
            make_request(f"r{self.count}", prompt, max_tokens, priority=priority, prompt_logprobs=prompt_logprobs)
        )

    def take(self, request: GenerateRequest) -> None:
        self.count += 1
        self.core.submit(request)
        self.live[request.id] = request
        self.answers[request.id] = []
        self.scores[request.id] = []

    def launch(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.device.launch(plan)

    def collect(self) -> None:
        result = self.device.collect(None)
        if result is not None:
            self.scheduler.commit(result)

    def abort(self, name: str) -> None:
        assert self.core.abort(name)
        assert not self.core.abort(name), "a second abort finds nothing"

    def judge(self) -> None:
        for output in self.scheduler.take_outputs():
            request = self.live[output.id]
            answer = self.answers[output.id]
            answer.extend(output.token_ids)
            scores = self.scores[output.id]
            scores.extend(entry.logprob for entry in output.prompt_logprobs or [])
            expected = solo_answer(request)
            assert answer == expected[: len(answer)]
            if output.finish_reason is None:
                continue
            del self.live[output.id]
            if output.finish_reason != FinishReason.ABORT:
                assert answer == expected
                # The simulator scores a token by itself: each prompt token but the first, once, in order.
                assert scores == (request.prompt_ids[1:] if request.sampling.prompt_logprobs is not None else [])
                self.finished += 1
        self.scheduler.check()
        self.device.check()

    def rest(self) -> None:
        """Let everything end; afterwards no page is held and all slots are free."""
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.launch()
            self.collect()
            self.judge()
        assert not self.core.has_work
        assert not self.live
        pool = self.scheduler.cache.pool
        assert pool.held == 0
        assert pool.free + pool.cached == pool.total
        assert self.scheduler.cache.tree.locked_pages == 0
        windows = self.scheduler.cache.windows
        assert windows is None or windows.in_use == windows.reserved == 0


SHAPES = [
    {"pages": 40, "page_size": 4, "max_batch": 4, "chunk_tokens": 8},
    {"pages": 80, "page_size": 1, "max_batch": 3, "chunk_tokens": 5},
    {"pages": 5, "page_size": 16, "max_batch": 8, "chunk_tokens": 64},
    {"pages": 40, "page_size": 4, "max_batch": 4, "chunk_tokens": 8, "width": 4},
    {"pages": 80, "page_size": 1, "max_batch": 3, "chunk_tokens": 5, "width": 7},
    {"pages": 40, "page_size": 4, "max_batch": 4, "chunk_tokens": 8, "window": 7, "run_ahead": 3},
    {"pages": 80, "page_size": 1, "max_batch": 3, "chunk_tokens": 5, "window": 6, "window_pages": 20, "run_ahead": 3},
    {"pages": 60, "page_size": 4, "max_batch": 4, "chunk_tokens": 5, "window": 1, "width": 4, "run_ahead": 3},
    {"pages": 40, "page_size": 2, "max_batch": 4, "chunk_tokens": 8, "window": 9, "width": 3, "run_ahead": 3},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(f"{name}{shape[name]}" for name in shape))
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_ten_thousand_random_events(shape: dict[str, int], depth: int):
    rng = random.Random(depth)
    events = Events(**shape)
    bases = [[rng.randrange(2) for _ in range(40)] for _ in range(3)]
    for _ in range(3_000 if "window" in shape else 10_000):
        kind = rng.random()
        if kind < 0.12 and len(events.live) < 12:
            prompt = rng.choice(bases)[: rng.randrange(1, 40)] + [rng.randrange(2) for _ in range(rng.randrange(4))]
            events.submit(prompt, rng.randrange(20), rng.choice([0, 0, 0, 1, 2]), rng.random() < 0.2)
        elif kind < 0.15 and events.live:
            events.abort(rng.choice(sorted(events.live)))
        elif kind < 0.6 and events.scheduler.in_flight < depth:
            events.launch()
        else:
            events.collect()
        events.judge()
    events.rest()
    stats = events.scheduler.stats
    assert events.finished > 50
    assert stats.aborted > 10
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert events.device.most_chunks > 1
    assert (0 < events.device.accepted < events.device.guessed) == ("width" in shape)


class EventMachine(RuleBasedStateMachine):
    """Events in the order that hypothesis finds most telling. Subclasses make `events` and bring requests."""

    events: Events

    @precondition(lambda self: self.events.scheduler.in_flight < 4)
    @rule()
    def launch(self) -> None:
        self.events.launch()

    @rule()
    def collect(self) -> None:
        self.events.collect()

    @precondition(lambda self: self.events.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.events.abort(data.draw(st.sampled_from(sorted(self.events.live))))

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "events"):
            self.events.judge()

    def teardown(self) -> None:
        if hasattr(self, "events"):
            self.events.rest()


class EngineMachine(EventMachine):
    """The accounting's events."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: dict[str, int]) -> None:
        self.events = Events(**shape)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        max_tokens=st.integers(0, 20),
        priority=st.integers(0, 2),
        scored=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, priority: int, scored: bool) -> None:
        self.events.submit(prompt, max_tokens, priority, scored)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
