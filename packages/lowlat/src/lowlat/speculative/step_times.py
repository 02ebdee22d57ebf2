"""How long a step of so many rows takes here: measured at start, kept up to date by the steps themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

_WEIGHT = 0.02
"""Of a step in the time of its own number of rows."""
_COMMON = 0.06
"""Of the same in the times of all: contexts grow and machines get busy for every number of rows, and those that seldom
run must not look cheaper for it."""
_OUTLIER = 3.0


class StepTimes:
    """Seconds of a decode step by its rows; between measured numbers of rows on a straight line."""

    def __init__(self, seconds: dict[int, float]) -> None:
        if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
            raise ValueError("a table of step times needs rows of 1 and more, each with a time above 0")
        self._rows = sorted(seconds)
        self._seconds = [seconds[rows] for rows in self._rows]

    @classmethod
    def measure(cls, run: Callable[[int], float], rows: Iterable[int], repeats: int = 3) -> StepTimes:
        """`run` computes a step of so many rows and returns its seconds; the best of `repeats` counts, since whatever
        else the machine does only adds."""
        return cls({count: max(1e-9, min(run(count) for _ in range(repeats))) for count in rows})

    def __call__(self, rows: int) -> float:
        """Seconds of a step of `rows` rows."""
        known, seconds = self._rows, self._seconds
        if rows <= known[0] or len(known) == 1:
            return seconds[0]
        right = min(bisect_left(known, rows), len(known) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        if rows > known[-1]:
            slope = max(0.0, slope)
        return seconds[right] + slope * (rows - known[right])

    def observe(self, rows: int, seconds: float) -> None:
        """A step has taken so long. What is far beyond the table says more of the machine's other work than of it."""
        place = bisect_left(self._rows, rows)
        if place < len(self._rows) and self._rows[place] == rows and seconds < _OUTLIER * self._seconds[place]:
            share = seconds / self._seconds[place] - 1
            self._seconds = [known * (1 + _COMMON * share) for known in self._seconds]
            self._seconds[place] += _WEIGHT * (seconds - self._seconds[place])

    def table(self) -> list[tuple[int, float]]:
        """(rows, seconds), by rows."""
        return list(zip(self._rows, self._seconds, strict=True))


def rows_to_measure(width: int, most: int) -> list[int]:
    """Every number of rows that one request can have, then powers of two up to `most`."""
    rows = set(range(1, width + 1)) | {most}
    rows |= {1 << n for n in range(most.bit_length()) if 1 << n <= most}
    return sorted(count for count in rows if count <= most)
