"""What two prompts have in common, which decides whether one waits for the other's prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowlat.engine.active import common_tokens

TOKENS = st.lists(st.integers(0, 1), max_size=40)


@given(TOKENS, TOKENS, st.integers(0, 50))
def test_as_counted_one_by_one(one, other, limit):
    expected = 0
    for mine, theirs in zip(one[:limit], other[:limit]):
        if mine != theirs:
            break
        expected += 1
    assert common_tokens(one, other, limit) == expected


def test_the_same_body_behind_another_beginning_is_not_common():
    assert common_tokens([1] * 64 + [7] * 600, [2] * 64 + [7] * 600, 664) == 0
