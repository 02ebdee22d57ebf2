"""Medians, intervals and alternation: the statistics that every benchmark of this project shares.

Standard library only, and deterministic: the same samples always give the same interval.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec


class Interval(msgspec.Struct, frozen=True):
    """A point estimate with the ends of its 95 % interval, and the number of samples behind it."""

    value: float
    low: float
    high: float
    samples: int

    def excludes(self, other: float) -> bool:
        """Whether `other` lies outside the interval."""
        return other < self.low or other > self.high


def percentile(samples: Sequence[float], q: float) -> float:
    """The `q`-quantile (0..1) with linear interpolation between order statistics.

    Raises ValueError where there are no samples or `q` is outside 0..1.
    """
    if not samples:
        raise ValueError("percentile of no samples")
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q must lie between 0 and 1, not {q}")
    ordered = sorted(samples)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = math.ceil(at)
    if below == above:
        return float(ordered[below])
    return float(ordered[below] + (ordered[above] - ordered[below]) * (at - below))


def _binomial_tail(n: int, k: int, p: float) -> float:
    """P(Binomial(n, p) >= k), summed in logarithms so that large `n` neither overflows nor underflows."""
    if k <= 0 or p >= 1.0:
        return 1.0
    if p <= 0.0:
        return 0.0
    log_p, log_q, log_n = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    terms = (
        math.exp(log_n - math.lgamma(j + 1) - math.lgamma(n - j + 1) + j * log_p + (n - j) * log_q)
        for j in range(k, n + 1)
    )
    return min(1.0, math.fsum(terms))


def _order_statistic_bound(n: int, rank: int, probability: float) -> int:
    """Smallest index i (0-based) with P(the `rank`-th of n draws with replacement <= sorted[i]) >= `probability`."""
    low, high = 0, n - 1
    while low < high:
        middle = (low + high) // 2
        if _binomial_tail(n, rank, (middle + 1) / n) >= probability:
            high = middle
        else:
            low = middle + 1
    return low


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Median and its bootstrap percentile interval, in the limit of infinitely many resamples.

    The bootstrap distribution of an order statistic is a binomial tail, so nothing has to be drawn at random. For an
    even number of samples the lower end is the lower middle's and the upper end the upper middle's, which widens the
    interval by at most one order statistic. Raises ValueError where there are no samples.
    """
    if not samples:
        raise ValueError("median of no samples")
    ordered = sorted(float(s) for s in samples)
    n, tail = len(ordered), (1.0 - confidence) / 2
    lower_rank, upper_rank = (n + 1) // 2, n // 2 + 1
    low = ordered[_order_statistic_bound(n, lower_rank, tail)]
    high = ordered[_order_statistic_bound(n, upper_rank, 1.0 - tail)]
    return Interval(statistics.median(ordered), low, high, n)


def bootstrap_interval(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Seeded bootstrap percentile interval of any statistic of independent samples (a P90, a mean)."""
    if not samples:
        raise ValueError("statistic of no samples")
    draw = random.Random(seed)
    values = [statistic(draw.choices(samples, k=len(samples))) for _ in range(resamples)]
    tail = (1.0 - confidence) / 2
    return Interval(statistic(samples), percentile(values, tail), percentile(values, 1.0 - tail), len(samples))


def ratio_interval(
    numerator: Sequence[Sequence[float]],
    denominator: Sequence[Sequence[float]],
    *,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Ratio of a statistic of two arms measured in alternation, with its interval.

    Both arguments hold one sequence of samples a round; round i of both was measured side by side. Rounds are resampled
    as pairs and the samples inside a round again, so drift between rounds cancels and noise inside them does not.
    With a single round only the samples are resampled. Raises ValueError where rounds are missing or not paired.
    """
    if not numerator or len(numerator) != len(denominator):
        raise ValueError(f"a ratio needs paired rounds, got {len(numerator)} and {len(denominator)}")
    if not all(numerator) or not all(denominator):
        raise ValueError("a round holds no samples")

    def pooled(rounds: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float]:
        return [s for i in chosen for s in rounds[i]]

    everything = range(len(numerator))
    value = statistic(pooled(numerator, everything)) / statistic(pooled(denominator, everything))
    draw = random.Random(seed)
    values = []
    for _ in range(resamples):
        chosen = draw.choices(everything, k=len(numerator))
        above, below = pooled(numerator, chosen), pooled(denominator, chosen)
        values.append(statistic(draw.choices(above, k=len(above))) / statistic(draw.choices(below, k=len(below))))
    tail = (1.0 - confidence) / 2
    count = min(sum(map(len, numerator)), sum(map(len, denominator)))
    return Interval(value, percentile(values, tail), percentile(values, 1.0 - tail), count)


class Alternation(msgspec.Struct):
    """What `alternate` measured: for every arm one list of samples a round; arms that broke, with their error."""

    rounds: dict[str, list[list[float]]]
    errors: dict[str, str]
    order: list[str]
    """The arms in the order in which they ran, warm-up excluded."""

    def samples(self, arm: str) -> list[float]:
        """All samples of an arm, in the order measured."""
        return [s for one_round in self.rounds[arm] for s in one_round]

    def ratio(self, numerator: str, denominator: str) -> Interval:
        """Ratio of the medians of two arms (see `ratio_interval`)."""
        return ratio_interval(self.rounds[numerator], self.rounds[denominator])


Arm = Callable[[], float | Sequence[float]]


def alternate(
    arms: Mapping[str, Arm],
    rounds: int,
    *,
    warmup: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
    measured: Callable[[Alternation], None] = lambda so_far: None,
) -> Alternation:
    """Measure arms in alternation: A B C, C B A in every round (ABBA for two), so slow drift hits all arms alike.

    An arm is a callable that measures once and returns one sample or several. An arm that raises is dropped with its
    error and the others go on; its earlier samples are dropped too, since they are no longer paired. `progress` is
    called with (arm, round, rounds), `measured` with the whole rounds so far, behind each. Raises ValueError where
    there is no arm or no round.
    """
    if not arms or rounds < 1:
        raise ValueError("alternation needs at least one arm and one round")
    result = Alternation({name: [] for name in arms}, {}, [])

    def measure(name: str) -> list[float] | None:
        if name in result.errors:
            return None
        try:
            got = arms[name]()
        except Exception as error:  # an arm is someone else's code: its failure is a finding, not ours
            result.errors[name] = f"{type(error).__name__}: {error}"
            result.rounds.pop(name, None)
            return None
        return [float(got)] if isinstance(got, int | float) else [float(s) for s in got]

    for _ in range(warmup):
        for name in arms:
            measure(name)
    for index in range(rounds):
        collected: dict[str, list[float]] = {name: [] for name in arms}
        for name in [*arms, *reversed(list(arms))]:
            if progress is not None:
                progress(name, index + 1, rounds)
            got = measure(name)
            if got is not None:
                collected[name].extend(got)
                result.order.append(name)
        for name, samples in collected.items():
            if name not in result.errors:
                result.rounds[name].append(samples)
        measured(result)
    return result
