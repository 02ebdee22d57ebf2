"""`lowlat bench compare A B`: what changed between two results, with a verdict only beyond noise."""

from __future__ import annotations

import math

import msgspec

from lowlat.bench.report import Shape, shape_of
from lowlat.bench.results import LOWER_IS_BETTER, TIMES, Result, Row

REFERENCES = ("read-floor", "torch-compile", "torch-eager-graph", "transformers", "general")
"""Arms by which two runs are put on one scale, first choice first: machines and clocks drift between runs."""


class Change(msgspec.Struct, kw_only=True):
    """One value in both results. `ratio` is B over A; `verdict` is better, worse, same or no verdict, with a reason."""

    shape: Shape
    arm: str
    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    reference: str | None
    verdict: str
    reason: str = ""


def _half_width(row: Row) -> float:
    """Relative half-width of a row's interval, on a logarithmic scale; infinite where that is meaningless."""
    if row.low <= 0 or row.high <= 0:
        return math.inf
    return max(math.log(row.high / row.median), math.log(row.median / row.low)) if row.median > 0 else math.inf


def _index(result: Result) -> dict[tuple[Shape, str, str], Row]:
    return {(shape_of(row), row.metric, row.arm): row for row in result.rows}


def _same_machine(a: Result, b: Result) -> bool:
    return (a.machine.gpu, a.machine.gpus, a.machine.cpu) == (b.machine.gpu, b.machine.gpus, b.machine.cpu)


def compare(a: Result, b: Result, *, threshold: float = 0.02) -> list[Change]:
    """Every value that both results hold, in the order of A.

    Where both measured a reference arm of the same shape, ratios are of value over reference, so that drift between the
    runs cancels. The interval of a ratio joins the intervals of its values as independent errors. A verdict is given
    where the interval excludes 1 and the change exceeds `threshold`; what was measured on different machines, or with
    simulated weights or acceptance in one of them, gets none.
    """
    first, second = _index(a), _index(b)
    changes = []
    for key, row in first.items():
        other = second.get(key)
        if other is None or row.median <= 0 or other.median <= 0:
            continue
        shape, metric, arm = key
        change = math.log(other.median) - math.log(row.median)
        squares, reference = _half_width(row) ** 2 + _half_width(other) ** 2, None
        for candidate in REFERENCES:
            mine, theirs = first.get((shape, metric, candidate)), second.get((shape, metric, candidate))
            if candidate != arm and mine is not None and theirs is not None and mine.median > 0 and theirs.median > 0:
                change += math.log(mine.median) - math.log(theirs.median)
                squares += _half_width(mine) ** 2 + _half_width(theirs) ** 2
                reference = candidate
                break
        spread = math.sqrt(squares)
        ratio, low, high = _power(change), _power(change - spread), _power(change + spread)
        verdict, reason = _verdict(metric, change, spread, threshold)
        counted = metric == "host_instructions_per_step"
        if a.simulated != b.simulated:
            verdict, reason = "no verdict", "weights or acceptance are simulated in one of them"
        elif not counted and not _same_machine(a, b):
            verdict, reason = "no verdict", "different machines"
        elif metric in TIMES and (row.samples < 5 or other.samples < 5):
            verdict, reason = "no verdict", "fewer than 5 samples"
        elif verdict != "same" and not counted and min(row.samples, other.samples) < 2:
            verdict, reason = "no verdict", "a single sample has no interval"
        changes.append(
            Change(
                shape=shape, arm=arm, metric=metric, a=row.median, b=other.median, ratio=ratio, low=low, high=high,
                reference=reference, verdict=verdict, reason=reason,
            )
        )  # fmt: skip
    return changes


def _power(exponent: float) -> float:
    """e to it; infinite where no float is so large."""
    return math.exp(exponent) if exponent < 709 else math.inf


def _verdict(metric: str, change: float, spread: float, threshold: float) -> tuple[str, str]:
    """`change`: logarithm of the ratio, and half of its interval's width."""
    if abs(change) <= spread:
        return "same", "the interval holds 1"
    if abs(change) <= math.log1p(threshold):
        return "same", f"below the threshold of {threshold:.0%}"
    return ("better" if (change < 0) == (metric in LOWER_IS_BETTER) else "worse"), ""
