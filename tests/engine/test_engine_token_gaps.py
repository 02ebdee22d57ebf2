"""Times between tokens where steps bring several: by token, and not beyond the answer's end."""

from __future__ import annotations

import pytest

from lowlat.engine.token_gaps import mean_and_p90_ms, token_gaps

ARRIVALS = [(1.0, 1), (3.0, 3), (4.0, 2), (9.0, 2)]


@pytest.mark.parametrize(
    ("tokens", "gaps"),
    [
        (8, [2.0, 0.0, 0.0, 1.0, 0.0, 5.0, 0.0]),
        (6, [2.0, 0.0, 0.0, 1.0, 0.0]),
        (5, [2.0, 0.0, 0.0, 1.0]),
        (2, [2.0]),
        (1, []),
        (0, []),
    ],
)
def test_gaps_are_by_token_and_end_with_the_answer(tokens: int, gaps: list[float]):
    assert token_gaps(ARRIVALS, tokens) == gaps
    assert token_gaps([], tokens) == []


def test_mean_and_p90():
    assert mean_and_p90_ms([]) == (None, None)
    assert mean_and_p90_ms([0.002]) == (2.0, 2.0)
    assert mean_and_p90_ms([0.001 * n for n in range(10, 0, -1)]) == (pytest.approx(5.5), pytest.approx(9.0))
