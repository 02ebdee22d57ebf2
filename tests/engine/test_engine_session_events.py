"""Random events among sessions: pins, pages and windows add up at every moment, and all can be had again at the end."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, rule
from kv_simulator import make_core, make_request
from test_engine_accounting import EventMachine, Events
from test_engine_sessions import Clock
from test_engine_state import make_state_core

from lowlat.engine.core import EngineCore


class SessionEvents(Events):
    """The accounting test's events, with sessions, time and their ends among them."""

    def __init__(self, state: bool, **shape: Any) -> None:
        super().__init__()
        self.clock = Clock()
        make: Any = make_state_core if state else make_core
        core: EngineCore
        core, self.device = make(clock=self.clock, **shape)
        self.core, self.scheduler = core, core.scheduler
        self.most_pinned = 0

    def turn(self, prompt: list[int], max_tokens: int, session: str, ttl: float, salt: str, priority: int) -> None:
        fields = {"session_id": session, "session_ttl": ttl, "cache_salt": salt, "priority": priority}
        self.take(make_request(f"r{self.count}", prompt, max_tokens, **fields))

    def judge(self) -> None:
        super().judge()
        self.most_pinned = max(self.most_pinned, self.scheduler.cache.tree.pinned_pages)

    def rest(self) -> None:
        """Everything ends although pins are held; once they expire, all pages can be had again."""
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.launch()
            self.collect()
            self.judge()
        self.clock.now += 1000.0
        assert self.core.turn() == []
        super().rest()
        stats = self.core.stats()
        assert (stats.sessions, stats.pages_pinned) == (0, 0)
        windows = self.scheduler.cache.windows
        assert windows is None or windows.available == windows.total
        assert self.scheduler.cache.sessions._known == {}
        cache = self.scheduler.cache
        cache.tree.clear()
        assert cache.pool.free == cache.pool.total


SHAPES: list[dict[str, Any]] = [
    {"state": False, "pages": 24, "page_size": 4, "session_budget": 0.5},
    {"state": False, "pages": 70, "page_size": 1, "session_budget": 1.0, "max_batch": 2},
    {"state": False, "pages": 24, "page_size": 4, "session_budget": 0.9, "width": 4},
    {"state": False, "pages": 40, "page_size": 4, "session_budget": 0.6, "window": 7, "run_ahead": 3},
    {"state": False, "pages": 70, "page_size": 1, "session_budget": 1.0, "window": 3, "width": 3, "run_ahead": 3},
    {"state": True, "pages": 24, "page_size": 4, "session_budget": 0.6, "snapshots": 9, "max_batch": 3},
    {"state": True, "pages": 70, "page_size": 1, "session_budget": 1.0, "snapshots": 4, "width": 4, "max_batch": 2},
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_random_events(number: int):
    depth = 1 + number % 3
    rng = random.Random(number)
    events = SessionEvents(**SHAPES[number])
    said = {name: [rng.randrange(2) for _ in range(rng.randrange(1, 12))] for name in "abcdef"}
    for _ in range(2_000):
        kind = rng.random()
        if kind < 0.1 and len(events.live) < 10:
            name = rng.choice("abcdef")
            if len(said[name]) > 40:
                said[name] = said[name][: rng.randrange(1, 30)]
            said[name] = said[name] + [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            events.turn(said[name], rng.randrange(12), name, rng.choice([1.0, 50.0]), rng.choice(["", "", "s"]), 0)
        elif kind < 0.14 and len(events.live) < 10:
            events.submit([rng.randrange(2, 50) for _ in range(rng.randrange(1, 40))], 12, rng.choice([0, 0, 1]))
        elif kind < 0.17 and events.live:
            events.abort(rng.choice(sorted(events.live)))
        elif kind < 0.19:
            events.core.end_session(rng.choice("abcdef"), "")
        elif kind < 0.22:
            events.clock.now += rng.choice([0.5, 1.0, 10.0])
        elif kind < 0.6 and events.scheduler.in_flight < depth:
            events.launch()
        else:
            events.collect()
        events.judge()
    events.rest()
    lost = Counter(dict(events.core.stats().session_pins_lost))
    assert events.finished > 50
    assert events.most_pinned > 2
    assert lost["expired"] > 0
    assert lost["ended"] > 0
    assert lost["pages"] + lost["budget"] > 0, lost


class SessionMachine(EventMachine):
    """The events of sessions."""

    events: SessionEvents

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: dict[str, Any]) -> None:
        self.events = SessionEvents(**shape)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        max_tokens=st.integers(0, 20),
        session=st.sampled_from(["", "a", "b", "c"]),
        ttl=st.sampled_from([1.0, 10.0]),
        salt=st.sampled_from(["", "s"]),
        priority=st.integers(0, 1),
    )
    def turn(self, prompt: list[int], max_tokens: int, session: str, ttl: float, salt: str, priority: int) -> None:
        self.events.turn(prompt, max_tokens, session, ttl, salt, priority)

    @rule(seconds=st.sampled_from([0.5, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.events.clock.now += seconds

    @rule(session=st.sampled_from(["a", "b", "c"]), salt=st.sampled_from(["", "s"]))
    def end(self, session: str, salt: str) -> None:
        self.events.core.end_session(session, salt)
        assert not self.events.core.end_session(session, salt)


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
