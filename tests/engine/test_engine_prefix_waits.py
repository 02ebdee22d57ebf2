"""When a request waits for a prefix that another one computes, and what two prompts have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.active import ActiveRequest
from lowlat.engine.prefix_waits import WORTH_WAITING, comes_soon, common_tokens
from lowlat.engine.request import GenerateRequest, SamplingParams

PAGE = 16
TOKENS = st.lists(st.integers(0, 1), max_size=40)
PREFIX = list(range(3, 3 + 2 * WORTH_WAITING))


def active(prompt: list[int], arrival: int, *, priority: int = 0, salt: str = "") -> ActiveRequest:
    sampling = SamplingParams(max_tokens=4)
    request = GenerateRequest(id=str(arrival), prompt_ids=prompt, sampling=sampling, cache_salt=salt)
    found = ActiveRequest(request, (-priority, arrival), 0, frozenset())
    found.prefill_end = found.launched = len(prompt)
    return found


def waits(computing: ActiveRequest, *, cached: int = 0, enabled: bool = True, priority: int = 0) -> bool:
    waiting = active([*PREFIX, 1, 1], 2, priority=priority)
    return comes_soon(waiting, cached, [computing], PrefixCache(64, PAGE, enabled=enabled))


def test_a_prefix_under_way_is_waited_for():
    assert waits(active([*PREFIX, 2], 1))


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        (PREFIX[: WORTH_WAITING - 1], {}),  # too little
        ([2, *PREFIX], {}),  # another beginning
        ([*PREFIX, *[2] * 3 * len(PREFIX)], {}),  # what comes behind it takes longer than the prefix saves
        ([*PREFIX, 2], {"cached": len(PREFIX) - PAGE}),  # most of it is cached
        ([*PREFIX, 2], {"enabled": False}),
        ([*PREFIX, 2], {"priority": 1}),  # it would be preempted
    ],
)
def test_a_prefix_that_saves_too_little_or_comes_late_is_not(prompt, settings):
    assert not waits(active(prompt, 1), **settings)


def test_salts_wait_for_nobody_elses_prefix():
    assert not waits(active([*PREFIX, 2], 1, salt="other"))


def test_of_a_request_that_ended_what_is_launched_still_comes():
    ended = active([*PREFIX, 2], 1)
    ended.ended = True
    assert waits(ended)
    ended.launched = WORTH_WAITING - 1
    assert not waits(ended)


def test_what_is_computed_is_not_waited_for():
    done = active([*PREFIX, 2], 1)
    done.filled = done.prefill_end
    assert not waits(done)


@given(TOKENS, TOKENS, st.integers(0, 50))
def test_common_tokens_are_those_counted_one_by_one(one, other, limit):
    expected = 0
    for mine, theirs in zip(one[:limit], other[:limit]):
        if mine != theirs:
            break
        expected += 1
    assert common_tokens(one, other, limit) == expected


def test_the_same_body_behind_another_beginning_is_not_common():
    assert common_tokens([1] * 64 + [7] * 600, [2] * 64 + [7] * 600, 664) == 0
