"""How many guesses of each request a step checks: those that make tokens come fastest.

With chances c of each guess being right if those before it were, guess k is accepted with probability
s_k = c_1 ... c_k, and a step of N requests that checks a set of guesses brings N tokens and the sum of their s on
average. The best step has the most tokens a second (DeepSeek-V4.1's confidence-scheduled verification).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def plan_guesses(
    chances: Sequence[Sequence[float]],
    step_seconds: Callable[[int], float],
    rows: int,
    extra_seconds: float = 0.0,
) -> list[int]:
    """How many of its guesses each request gets checked.

    Args:
        chances: for each request, of each guess being right if those before it were.
        step_seconds: a step's time by its rows.
        rows: the step's rows without guesses: one for each request, and others' rows.
        extra_seconds: what guesses take beside, as soon as there is one.
    """
    counts = [0] * len(chances)
    expected = float(len(chances))
    best, best_counts = _rate(expected, step_seconds(rows)), list(counts)
    # Chances do not exceed 1, so a request's own guesses come in order; ties go to earlier places, then requests.
    heap = [(-of[0], 0, index) for index, of in enumerate(chances) if of]
    heapq.heapify(heap)
    checked = 0
    while heap:
        negative, place, index = heapq.heappop(heap)
        counts[index] = place + 1
        expected -= negative
        checked += 1
        if place + 1 < len(chances[index]):
            survival = -negative * min(1.0, chances[index][place + 1])
            heapq.heappush(heap, (-survival, place + 1, index))
        rate = _rate(expected, step_seconds(rows + checked) + extra_seconds)
        if rate > best:
            best, best_counts = rate, list(counts)
    return best_counts


def expected_tokens(chances: Sequence[float]) -> float:
    """Tokens that one request's step brings on average when all its guesses are checked."""
    total = survival = 1.0
    for chance in chances:
        survival *= chance
        total += survival
    return total


def _rate(tokens: float, seconds: float) -> float:
    return tokens / max(seconds, 1e-12)
