"""Sessions pin what their requests computed: within the budget, until they expire, and never against a request."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kv_simulator import drain, make_core, make_request, solo_answer
from test_engine_state import make_state_core

PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Agent:
    """An engine on a simulated device, with a clock that stands still unless it is told otherwise."""

    def __init__(self, *, state: bool = False, **shape: Any) -> None:
        self.clock = Clock()
        shape = {"pages": 24, "page_size": PAGE, "session_budget": 0.5, "clock": self.clock} | shape
        self.core, self.device = (make_state_core if state else make_core)(**shape)
        self.count = 0

    def run(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> int:
        """One request to its end; returns its cached tokens."""
        request = make_request(f"r{self.count}", prompt, max_tokens, **{"session_ttl": 60.0, **fields})
        self.count += 1
        before = self.core.scheduler.stats.cached_tokens
        self.core.submit(request)
        assert drain(self.core, self.device)[request.id] == solo_answer(request)
        return self.core.scheduler.stats.cached_tokens - before

    def crowd(self, rng: random.Random, requests: int = 6) -> None:
        """Other users, one after the other, with prompts of no common beginning: more than the pool holds."""
        for _ in range(requests):
            self.run([rng.randrange(10, 50) for _ in range(40)])

    @property
    def pinned(self) -> int:
        return self.core.stats().pages_pinned

    @property
    def lost(self) -> dict[str, int]:
        return dict(self.core.stats().session_pins_lost)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 50), k=count)


@pytest.mark.parametrize("shape", [{}, {"state": True}, {"window": 7}], ids=["pages", "state", "windows"])
def test_a_session_keeps_its_prefix_over_its_tool_wait(shape: dict[str, Any]):
    prompt = tokens(22, 1)
    for session, cached in (({}, 0), ({"session_id": "agent"}, 24)):
        agent = Agent(**shape)
        agent.run(prompt, 6, ignore_eos=True, **session)
        answer = solo_answer(make_request("", prompt, 6, ignore_eos=True))
        agent.crowd(random.Random(2))
        # 27 of the first turn's 28 tokens were computed: six whole pages.
        assert agent.run([*prompt, *answer, 5, 6, 7], **session) == cached
        assert (agent.pinned > 0) == bool(session)


def test_each_request_moves_the_pin():
    agent = Agent()
    prompt = tokens(12, 3)
    agent.run(prompt, 1, session_id="a")
    assert agent.pinned == 3
    agent.run([*prompt, *tokens(8, 4)], 1, session_id="a")
    assert agent.pinned == 5
    agent.run(tokens(9, 5), 1, session_id="a")
    assert agent.pinned == 2, "a conversation that began anew leaves the old one behind"
    stats = agent.core.stats()
    assert (stats.sessions, stats.pages_cached) == (1, 7)
    assert agent.lost == {}


def test_salts_keep_sessions_of_one_id_apart():
    agent = Agent()
    prompt = tokens(12, 6)
    agent.run(prompt, 1, session_id="a", cache_salt="one")
    assert agent.run(prompt, 1, session_id="a", cache_salt="two") == 0
    assert (agent.core.stats().sessions, agent.pinned) == (2, 6)
    assert not agent.core.end_session("a")
    assert agent.core.end_session("a", "one")
    assert not agent.core.end_session("a", "one")
    assert (agent.core.stats().sessions, agent.pinned) == (1, 3)
    assert agent.lost == {"ended": 1}


def test_sessions_expire_by_the_clock_alone():
    agent = Agent()
    agent.run(tokens(12, 7), 1, session_id="short", session_ttl=10.0)
    agent.run(tokens(12, 8), 1, session_id="long", session_ttl=30.0)
    for now, sessions in ((109.0, 2), (110.0, 1), (129.9, 1), (130.0, 0)):
        agent.clock.now = now
        assert agent.core.turn() == []
        assert agent.core.scheduler.cache.sessions.pinned == sessions
    assert agent.lost == {"expired": 2}
    assert agent.core.scheduler.cache.tree.locked_pages == 0


def test_a_session_does_not_expire_under_its_request():
    agent = Agent()
    prompt = tokens(12, 9)
    agent.run(prompt, 1, session_id="a", session_ttl=10.0)
    agent.core.submit(make_request("turn", [*prompt, *tokens(9, 10)], 3, session_id="a", session_ttl=10.0))
    agent.clock.now += 1000
    agent.core.turn()
    assert agent.pinned == 3
    drain(agent.core, agent.device)
    assert agent.pinned >= 5
    agent.clock.now += 10
    assert agent.pinned == 0


def test_over_budget_the_least_recently_used_loses_its_pin():
    agent = Agent(session_budget=0.5)  # 12 of 24 pages
    for name in "abc":
        agent.run(tokens(16, ord(name)), 1, session_id=name)
    agent.run(tokens(16, ord("a")), 1, session_id="a")
    assert agent.pinned == 12
    agent.run(tokens(16, ord("d")), 1, session_id="d")
    known = agent.core.scheduler.cache.sessions._known
    assert [id for _, id in known] == ["c", "a", "d"]
    assert agent.lost == {"budget": 1}


def test_a_prefix_above_the_budget_is_pinned_in_part():
    agent = Agent(session_budget=0.25)
    prompt = tokens(40, 11)
    agent.run(prompt, 1, session_id="a")
    assert agent.pinned == 6
    agent.crowd(random.Random(12), 3)
    assert agent.run([*prompt, 1], 1, session_id="a") == 24


def test_shared_pages_count_once():
    agent = Agent(session_budget=0.5)
    shared = tokens(32, 13)
    for number in range(4):
        agent.run([*shared, *tokens(4, 20 + number)], 1, session_id=f"s{number}")
    assert (agent.core.stats().sessions, agent.pinned) == (4, 12)
    for number in range(4):
        assert agent.core.end_session(f"s{number}")
        assert agent.pinned == (11 - number if number < 3 else 0)


def test_sessions_that_share_a_page_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowlat.cache.sessions.MOST_SESSIONS", 5)
    agent = Agent()
    for number in range(9):
        agent.run(tokens(8, 31), 1, session_id=f"s{number}")
    assert (agent.core.stats().sessions, agent.pinned) == (5, 2)
    assert agent.lost == {"budget": 4}


@pytest.mark.parametrize("extra", [{"session_budget": 0.0}, {"prefix_cache": False}])
def test_without_a_budget_or_a_cache_a_session_changes_nothing(extra: dict[str, Any]):
    agent = Agent(**extra)
    agent.run(tokens(12, 14), 1, session_id="a")
    assert (agent.pinned, agent.core.stats().sessions) == (0, 0)
    assert not agent.core.end_session("a")


def test_an_aborted_request_pins_what_it_computed():
    agent = Agent(chunk_tokens=8)
    prompt = tokens(40, 15)
    agent.core.submit(make_request("r", prompt, session_id="a", session_ttl=60.0))
    agent.core.turn()  # a chunk of 8 is committed, another is in flight and will be computed
    assert agent.core.abort("r")
    drain(agent.core, agent.device)
    assert agent.pinned == 4
    # One that never ran leaves the pin where it is.
    agent.core.submit(make_request("s", tokens(30, 16), session_id="a", session_ttl=60.0))
    assert agent.core.abort("s")
    drain(agent.core, agent.device)
    assert (agent.pinned, agent.core.stats().sessions) == (4, 1)
    agent.core.submit(make_request("t", tokens(30, 17), session_id="b", session_ttl=60.0))
    assert agent.core.abort("t")
    assert not agent.core.end_session("b"), "nothing is remembered of it"


def test_an_ended_session_is_not_pinned_by_what_still_runs():
    agent = Agent()
    agent.core.submit(make_request("r", tokens(20, 18), session_id="a", session_ttl=60.0))
    agent.core.turn()
    assert agent.core.end_session("a")
    drain(agent.core, agent.device)
    assert (agent.pinned, agent.core.stats().sessions) == (0, 0)


def test_a_running_request_takes_pins_before_another_is_preempted():
    agent = Agent(pages=16, max_context=64, max_batch=2)
    agent.run(tokens(16, 19), 1, session_id="old")
    agent.run(tokens(12, 20), 1, session_id="new")
    assert agent.pinned == 7
    # Two that grow to 6 pages each: 12 with 9 free, so three of the seven pins' pages must go.
    for name in "xy":
        agent.core.submit(make_request(name, tokens(8, ord(name)), 16, ignore_eos=True))
    drain(agent.core, agent.device)
    assert agent.core.scheduler.stats.preemptions == 0
    assert agent.lost == {"pages": 1}
    assert agent.pinned == 3, "the one used last keeps its pin"


def test_a_waiting_request_takes_pins_only_when_nothing_runs():
    agent = Agent(pages=16, max_context=64, max_batch=2)
    agent.run(tokens(28, 21), 1, session_id="a")
    assert agent.pinned == 7
    agent.core.submit(make_request("small", tokens(20, 22), 4, ignore_eos=True))
    agent.core.turn()
    agent.core.submit(make_request("large", tokens(40, 23), 1))
    while "small" in agent.core.scheduler._live:
        agent.core.turn()
        assert agent.core.scheduler.stats.waiting == 0 or agent.pinned == 7
    assert agent.pinned == 7
    drain(agent.core, agent.device)
    assert agent.pinned == 0
    assert agent.lost == {"pages": 1}


def test_a_higher_priority_takes_pins_before_it_preempts():
    agent = Agent(pages=16, max_context=64, max_batch=4)
    agent.run(tokens(28, 24), 1, session_id="a")
    agent.core.submit(make_request("low", tokens(20, 25), 12, ignore_eos=True))
    agent.core.turn()
    agent.core.submit(make_request("high", tokens(20, 26), 2, priority=1))
    drain(agent.core, agent.device)
    assert agent.core.scheduler.stats.preemptions == 0
    assert agent.lost == {"pages": 1}


def test_state_that_makes_a_hit_exact_stays_with_its_pin():
    agent = Agent(state=True, snapshots=6, pages=60)
    prompts = {name: tokens(14, ord(name)) for name in "abcd"}
    for name, prompt in prompts.items():
        agent.run(prompt, 1, session_id=name)
    # Half of six state rows: the first of four sessions had to go.
    assert agent.lost == {"budget": 1}
    agent.crowd(random.Random(27), 20)
    for name, prompt in prompts.items():
        assert agent.run([*prompt, 1, 2, 3], 1) == (0 if name == "a" else 12), name


def test_the_window_before_a_pin_stays_with_it():
    agent = Agent(window=9, window_pages=16, max_batch=1, pages=200, max_context=64)
    prompt = tokens(24, 28)
    agent.run(prompt, 1, session_id="a")
    agent.run(tokens(24, 29), 1)
    agent.crowd(random.Random(30), 12)
    assert agent.run([*prompt, 1], 1) == 24
    assert agent.run([*tokens(24, 29), 1], 1) == 0, "its pages are cached, but not its window"
    assert agent.core.scheduler.cache.tree.match(tokens(24, 29))[0]
