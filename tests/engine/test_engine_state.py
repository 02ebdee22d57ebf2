"""Models that keep state for a request: prefix hits resume it from snapshots, in whatever order things happen."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_simulator import EOS, KVSimulator, drain, make_request, solo_answer
from test_engine_accounting import Events

from lowlat.cache.prefix import PrefixCache
from lowlat.cache.rules import PrefillRules
from lowlat.cache.snapshots import Snapshots
from lowlat.engine.batch import PlanLimits, Replay, StepPlan, decode_plan, encode_plan
from lowlat.engine.core import EngineCore
from lowlat.engine.scheduler import Scheduler

WINDOW, WIDTH = 3, 4


class StateSimulator(KVSimulator):
    """A device whose every row also needs a window of its own before it, in a ring that its slot holds."""

    def __init__(self, cache: PrefixCache, limits: PlanLimits, rules: PrefillRules) -> None:
        super().__init__(cache, limits)
        self.rings: dict[int, dict[int, tuple[int, int]]] = {}
        self.restored = 0
        self.rules = rules
        # Room for a window, and for the guesses of a step or the tokens that a saved state reaches back over.
        self.places = WINDOW + max(WIDTH - 1, rules.state_reach)
        self.replays: dict[int, tuple[int, int, list[int]]] = {}
        self.replayed = 0
        self.begun: dict[int, int] = {}
        self.short_last_chunks = self.cut_last_chunks = self.saved_late = 0

    def compute(self, slot: int, position: int, token: int, hidden: range = range(0)) -> int:
        assert not hidden, "models with state have no items"
        floor, write_from, told = self.replays.get(slot, (0, 0, []))
        if position == floor:
            assert told == [self.kv[self.slot_of(slot, place)][0] for place in range(floor - len(told), floor)]
        if position < write_from:
            # A cached token that runs again: its page must hold it, and stays as it is.
            seen, digest = self.kv[self.slot_of(slot, position)]
            assert seen == token
            self.replayed += 1
        else:
            digest = super().compute(slot, position, token, hidden)
        ring = self.rings.setdefault(slot, {})
        places = self.places
        for before in range(max(floor, position - WINDOW), position):
            expected = (before, self.kv[self.slot_of(slot, before)][1])
            assert ring.get(before % places) == expected, "the slot holds another request's state"
        ring[position % places] = (position, digest)
        return digest

    def launch(self, plan: StepPlan) -> None:
        for row, slot in plan.restores:
            self.rings[slot] = dict(self.rings[row])
            self.restored += 1
        before = self.lengths.copy()
        begins = {slot for slot, _ in plan.begins}
        for slot in begins:
            self.replays.pop(slot, None)
        for replay in plan.replays:
            assert len(replay.before) == min(replay.start, self.rules.replay_history)
            self.replays[replay.slot] = (replay.start, replay.write_from, replay.before)
            self.rings[replay.slot] = {}
        for chunk in plan.chunks:
            before[chunk.slot] = chunk.start
            if chunk.slot in begins:
                self.begun[chunk.slot] = chunk.start
            if chunk.sample and len(chunk.tokens) < self.rules.last_chunk:
                assert chunk.start == self.begun[chunk.slot], "a last chunk is short though more was to compute"
                self.short_last_chunks += 1
            self.cut_last_chunks += chunk.sample and chunk.start > self.begun[chunk.slot]
        super().launch(plan)
        for slot, row in plan.saves:
            if self.lengths[slot] // self.size > before[slot] // self.size:
                self.rings[row] = dict(self.rings[slot])
                self.saved_late += self.lengths[slot] % self.size > 0


def make_state_core(
    *,
    pages: int = 40,
    page_size: int = 4,
    max_batch: int = 4,
    chunk_tokens: int = 8,
    snapshots: int = 20,
    width: int = 1,
    rules: PrefillRules | None = None,
    session_budget: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[EngineCore, StateSimulator]:
    rules = rules or PrefillRules()
    limits = PlanLimits(
        max_batch=max_batch, max_rows=chunk_tokens + max_batch * width, max_pages=min(-(-64 // page_size), pages)
    )
    cache = PrefixCache(
        pages,
        page_size,
        snapshots=Snapshots(max_batch, snapshots),
        session_budget=session_budget,
        clock=clock,
        replay=rules.replay,
    )
    scheduler = Scheduler(
        cache, limits, eos_ids=frozenset([EOS]), chunk_tokens=chunk_tokens, seed=0, width=width, rules=rules
    )
    device = StateSimulator(cache, limits, rules)
    return EngineCore(scheduler, device, run_ahead=1), device


class StateEvents(Events):
    def __init__(self, **shape: Any) -> None:
        super().__init__()
        self.core, self.device = make_state_core(**shape)
        self.scheduler = self.core.scheduler


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(
    ("snapshots", "last_chunk", "replay"), [(1, 1, 0), (6, 1, 0), (40, 1, 0), (6, 5, 0), (3, 5, WINDOW), (3, 1, 9)]
)
@pytest.mark.parametrize("width", [1, WIDTH])
def test_random_events(depth: int, snapshots: int, width: int, last_chunk: int, replay: int) -> None:
    rng = random.Random(depth * 100 + snapshots + width)
    page_size = 4 if last_chunk > 1 else rng.choice([1, 4])
    reach = page_size - 1 if last_chunk > 1 else 0
    rules = PrefillRules(last_chunk=last_chunk, state_reach=reach, replay=replay, replay_history=2)
    pages = 40 if page_size == 4 else 90
    events = StateEvents(page_size=page_size, pages=pages, snapshots=snapshots, width=width, rules=rules)
    bases = [[rng.randrange(2) for _ in range(40)] for _ in range(3)]
    for _ in range(4_000):
        kind = rng.random()
        if kind < 0.12 and len(events.live) < 12:
            prompt = rng.choice(bases)[: rng.randrange(1, 40)] + [rng.randrange(2) for _ in range(rng.randrange(4))]
            events.submit(prompt, rng.randrange(1, 20), rng.choice([0, 0, 0, 1, 2]))
        elif kind < 0.15 and events.live:
            events.abort(rng.choice(sorted(events.live)))
        elif kind < 0.6 and events.scheduler.in_flight < depth:
            events.launch()
        else:
            events.collect()
        events.judge()
    events.rest()
    snapshots_ = events.scheduler.cache.snapshots
    assert snapshots_ is not None
    assert not snapshots_._held
    assert events.finished > 50
    assert events.device.cut_last_chunks > 20
    assert (events.device.short_last_chunks > 5) == (last_chunk > 1)
    assert (events.device.replayed > 20) == (replay > 0)
    assert last_chunk == 1 or events.device.saved_late > 5
    assert events.scheduler.stats.aborted > 10
    assert width == 1 or events.device.accepted > 100
    if snapshots > 6:
        assert events.scheduler.stats.preemptions > 0
        assert events.device.restored > 5  # type: ignore[attr-defined]
        assert events.scheduler.stats.cached_tokens > 0


def test_hits_reach_to_the_end_of_prompts_and_answers() -> None:
    core, device = make_state_core(page_size=4)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]
    core.submit(make_request("first", prompt, 9, ignore_eos=True))
    answer = drain(core, device)["first"]
    core.submit(make_request("again", prompt, 9, ignore_eos=True))
    assert drain(core, device)["again"] == answer
    assert core.scheduler.stats.cached_tokens == 8, "up to the prompt's last whole page"
    later = make_request("turn", [*prompt, *answer, 5], 9, ignore_eos=True)
    core.submit(later)
    assert drain(core, device)["turn"] == solo_answer(later)
    # 18 tokens of the first request were computed (its last one never is): four whole pages.
    assert core.scheduler.stats.cached_tokens == 8 + 16
    middle = make_request("middle", [*prompt[:6], 1, 1, 1], 3)
    core.submit(middle)
    assert drain(core, device)["middle"] == solo_answer(middle)
    assert core.scheduler.stats.cached_tokens == 8 + 16, "no state was kept inside the prompt"


def test_plans_carry_copies() -> None:
    limits = PlanLimits(max_batch=4, max_rows=8, max_pages=4)
    record = np.zeros(limits.words, dtype=np.int32)
    plan = StepPlan(7, [], [(1, 0, [3])], [], [0, 2], False, [(9, 1)], [(0, 5), (2, 6)])
    plan.replays = [Replay(1, 48, 64, [5, 6, 7]), Replay(2, 0, 16, [])]
    for previous in (None, [0, 2]):
        encode_plan(plan, record, previous)
        assert decode_plan(record, previous) == plan
