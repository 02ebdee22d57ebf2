"""Statistics of the benchmarks: exact medians and intervals, deterministic, and alternation that is really ABBA."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.bench.stats import (
    alternate,
    bootstrap_interval,
    median_interval,
    percentile,
    ratio_interval,
)

floats = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)


@given(st.lists(floats, min_size=1, max_size=60), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_percentile_agrees_with_numpy(samples, q):
    import numpy

    assert percentile(samples, q) == pytest.approx(float(numpy.percentile(samples, q * 100)))


@given(st.lists(floats, min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_median_interval_brackets_the_median(samples):
    got = median_interval(samples)
    assert got.low <= got.value <= got.high
    assert got.value == statistics.median(samples)
    assert got.low in samples
    assert got.high in samples
    assert got.samples == len(samples)
    assert median_interval(list(reversed(samples))) == got


@pytest.mark.parametrize("n", [5, 21, 40, 301])
def test_median_interval_is_the_limit_of_resampling(n):
    draw = random.Random(n)
    samples = [draw.lognormvariate(0, 0.5) for _ in range(n)]
    exact = median_interval(samples)
    drawn = bootstrap_interval(samples, statistics.median, resamples=4000)
    spread = exact.high - exact.low
    assert exact.low == pytest.approx(drawn.low, abs=0.2 * spread)
    assert exact.high == pytest.approx(drawn.high, abs=0.2 * spread)


def test_median_interval_covers_the_truth_about_as_often_as_it_says():
    draw = random.Random(1)
    hits = sum(not median_interval([draw.gauss(10, 1) for _ in range(31)]).excludes(10.0) for _ in range(400))
    assert 0.90 <= hits / 400 <= 0.99


def test_median_interval_of_many_samples_is_quick_and_narrow():
    draw = random.Random(2)
    got = median_interval([draw.gauss(0, 1) for _ in range(20000)])
    assert abs(got.value) < 0.05
    assert got.high - got.low < 0.08


def test_no_samples_are_refused():
    for call in (lambda: percentile([], 0.5), lambda: median_interval([]), lambda: bootstrap_interval([], max)):
        with pytest.raises(ValueError, match="no samples"):
            call()
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], 90)


def test_ratio_cancels_drift_between_rounds():
    draw = random.Random(3)
    slow, fast = [], []
    for index in range(12):
        drift = 1.0 + 0.5 * index
        slow.append([2.0 * drift * draw.gauss(1, 0.01) for _ in range(4)])
        fast.append([1.0 * drift * draw.gauss(1, 0.01) for _ in range(4)])
    got = ratio_interval(slow, fast)
    assert got.value == pytest.approx(2.0, rel=0.03)
    assert got.low < 2.0 < got.high
    assert got == ratio_interval(slow, fast)
    with pytest.raises(ValueError, match="paired"):
        ratio_interval(slow, fast[:-1])
    with pytest.raises(ValueError, match="no samples"):
        ratio_interval([[1.0], []], [[1.0], [1.0]])


def test_alternation_runs_abba_and_keeps_rounds_apart():
    seen, calls = [], iter(range(100))
    arms = {"a": lambda: float(next(calls)), "b": lambda: [float(next(calls)), 0.5]}
    got = alternate(arms, 3, warmup=1, progress=lambda arm, index, rounds: seen.append((arm, index, rounds)))
    assert got.order == ["a", "b", "b", "a"] * 3
    assert [arm for arm, _, _ in seen] == got.order
    assert got.rounds["a"][0] == [2.0, 5.0]
    assert got.rounds["b"][0] == [3.0, 0.5, 4.0, 0.5]
    assert len(got.samples("b")) == 12


def test_a_broken_arm_is_dropped_with_its_error_and_the_others_go_on():
    state = {"left": 4}

    def breaks():
        state["left"] -= 1
        if state["left"] == 0:
            raise RuntimeError("out of memory")
        return 1.0

    got = alternate({"good": lambda: 2.0, "bad": breaks}, 3)
    assert got.errors == {"bad": "RuntimeError: out of memory"}
    assert "bad" not in got.rounds
    assert got.samples("good") == [2.0] * 6
