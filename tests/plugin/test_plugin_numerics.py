"""Distances: what each metric measures, NaN and shapes included, and selections set apart from values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowlat_plugin import Bound, Metric, Selection
from lowlat_plugin.numerics import greedy, measure, measure_selection

A = torch.tensor([[1.0, -4.0], [0.5, 0.25]])


@pytest.mark.parametrize(
    ("metric", "limit", "candidate", "measured", "ok"),
    [
        (Metric.BITWISE, 0, A.clone(), 0, True),
        (Metric.BITWISE, 9, A + torch.tensor([[0.0, 0.0], [0.0, 1e-6]]), 1, False),
        (Metric.MAX_ABS, 0.5, A + 0.5, 0.5, True),
        (Metric.MAX_ABS, 0.4, A + 0.5, 0.5, False),
        (Metric.RELATIVE, 1.0, A + 0.5, 1.0, True),
        (Metric.COSINE, 0.999, A * 3, 1.0, True),
        (Metric.COSINE, 0.999, -A, -1.0, False),
    ],
)
def test_metrics(metric, limit, candidate, measured, ok):
    found = measure("x", Bound(metric, limit), A, candidate)
    assert found.measured == pytest.approx(measured)
    assert found.ok is ok
    assert ("within" in str(found)) is ok


@pytest.mark.parametrize("metric", list(Metric))
def test_nan_and_wrong_shapes_are_never_within(metric):
    broken = A.clone()
    broken[1, 0] = math.nan
    bound = Bound(metric, -1.0 if metric is Metric.COSINE else 1e9)
    assert not measure("x", Bound(metric, 0.5), A, broken).ok
    assert not measure("x", Bound(metric, 0.5), A, A[:1]).ok
    assert measure("x", bound, A, A).ok


def test_minus_zero_and_other_nan_bits_differ_bitwise():
    assert measure("x", Bound(Metric.BITWISE), torch.tensor([0.0]), torch.tensor([-0.0])).measured == 1
    nan = torch.tensor([math.nan])
    assert measure("x", Bound(Metric.BITWISE), nan, nan.clone()).ok


def test_zero_rows_have_no_relative_distance():
    zero = torch.zeros(2, 3)
    assert measure("x", Bound(Metric.RELATIVE, 0.1), zero, zero).ok
    assert not measure("x", Bound(Metric.RELATIVE, 0.1), zero, zero + 1e-9).ok


def test_selection_may_differ_only_between_near_ties():
    scores = torch.tensor([[0.9, 0.8, 0.79, 0.1], [0.5, 0.4, 0.3, 0.2]])
    general = Selection(torch.tensor([[0, 1], [0, 1]]), scores)
    same = measure_selection("router", 0.0, general, torch.tensor([[1, 0], [1, 0]]))
    assert (same.measured, same.ok) == (0.0, True)
    near = measure_selection("router", 0.02, general, torch.tensor([[0, 2], [0, 1]]))
    assert near.measured == pytest.approx(0.01)
    assert near.ok
    far = measure_selection("router", 0.02, general, torch.tensor([[3, 1], [0, 1]]))
    assert far.measured == pytest.approx(0.8)
    assert not far.ok


@pytest.mark.parametrize("chosen", [[[0, 4]], [[0, -1]], [[0, 0]], [[0]]])
def test_impossible_selections_are_infinitely_far(chosen):
    general = Selection(torch.tensor([[0, 1]]), torch.tensor([[0.9, 0.8, 0.1, 0.0]]))
    assert measure_selection("router", 1e9, general, torch.tensor(chosen)).measured == math.inf


def test_selections_need_scores():
    with pytest.raises(ValueError, match="no scores"):
        measure_selection("router", 0, Selection(torch.tensor([[0]])), torch.tensor([[0]]))


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3))
def test_the_score_given_up_is_what_a_loop_finds(seed, k, swaps):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, 8, generator=generator)
    general = scores.topk(k).indices
    chosen = general.clone()
    for row in range(min(swaps, 3)):
        others = [i for i in range(8) if i not in general[row].tolist()]
        chosen[row, 0] = others[seed % len(others)]
    worst = 0.0
    for row in range(3):
        ours, theirs = set(chosen[row].tolist()), set(general[row].tolist())
        gaps = [float(scores[row, a] - scores[row, b]) for a in theirs - ours for b in ours - theirs]
        worst = max([worst, *gaps])
    assert measure_selection("x", 0.0, Selection(general, scores), chosen).measured == pytest.approx(worst)


def test_greedy_is_the_largest_logit():
    assert greedy(torch.tensor([[1.0, 3.0, 2.0]])).indices.tolist() == [[1]]
