"""Slots and pages: who gets them, and when they are free again."""

from __future__ import annotations

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.active import ActiveRequest
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.running_set import RunningSet


def make(max_batch: int = 2) -> tuple[PrefixCache, RunningSet]:
    cache = PrefixCache(8, 4)
    return cache, RunningSet(cache, None, max_batch)


def begin(cache: PrefixCache, running: RunningSet, name: str, arrival: int, priority: int = 0) -> ActiveRequest:
    prompt = [arrival + 5] * 6
    request = GenerateRequest(id=name, prompt_ids=prompt, sampling=SamplingParams(max_tokens=2))
    active = ActiveRequest(request, (-priority, arrival), 0, frozenset())
    lease = cache.begin(prompt)
    cache.extend(lease, active.places)
    running.begin(active, lease)
    return active


def test_whoever_comes_last_in_the_order_is_preempted_and_gives_all_back():
    cache, running = make()
    low = begin(cache, running, "low", 0)
    high = begin(cache, running, "high", 1, priority=1)
    assert running.requests == [high, low]
    assert (cache.pool.held, running.free_slots) == (4, [])
    running.check()
    assert running.preempt() is low
    assert (low.slot, low.lease, low.ended) == (-1, None, False)
    assert (cache.pool.held, running.free_slots) == (2, [0])
    running.check()


def test_pages_of_a_request_in_flight_are_free_after_its_last_step():
    cache, running = make()
    active = begin(cache, running, "a", 0)
    active.in_flight, active.last_step, active.ended = 2, 5, True
    running.end(active)
    running.release_ended(4)
    assert (running.requests, running.ending) == ([], [active])
    assert (cache.pool.held, sorted(running.free_slots)) == (2, [1])
    running.check()
    running.release_ended(5)
    assert (running.ending, cache.pool.held, sorted(running.free_slots)) == ([], 0, [0, 1])
    running.check()


def test_what_was_computed_passes_to_the_prefix_tree():
    cache, running = make()
    active = begin(cache, running, "a", 0)
    active.filled, active.ended = 6, True
    running.end(active)
    assert (cache.pool.cached, cache.pool.held) == (1, 0)  # one whole page of four tokens


def test_a_session_of_a_request_that_never_began_is_left():
    cache, running = make()
    active = ActiveRequest(
        GenerateRequest(id="a", prompt_ids=[5] * 6, sampling=SamplingParams(max_tokens=2)), (0, 0), 0, frozenset()
    )
    active.session = cache.sessions.join("agent", "", 10.0)
    active.ended = True
    running.end(active)
    assert active.session.live == 0
    assert not cache.sessions.end("agent", ""), "nobody is left who would keep it"
    assert running.free_slots == [1, 0]
    running.check()
