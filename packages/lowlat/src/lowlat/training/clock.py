"""How much of a training is done, and how long the rest will take."""

from __future__ import annotations

import time


class Clock:
    """Counts writing and learning; what comes before is over, what comes after is known in advance."""

    def __init__(self, steps: int, seconds: float | None, after: float, passed: float = 0.0) -> None:
        """`seconds`: for writing and learning, in place of `steps`. `after`: seconds for measuring and storing the
        draft. `passed`: seconds before a break."""
        self._steps, self.seconds, self.after = steps, seconds, after
        self._started = time.monotonic() - passed

    @property
    def passed(self) -> float:
        """Seconds of writing and learning so far."""
        return time.monotonic() - self._started

    def done(self, steps: int) -> float:
        """Part of the training that is over after so many steps, from 0 to 1."""
        return min(1.0, steps / self._steps if self.seconds is None else self.passed / self.seconds)

    def left(self, steps: int) -> float:
        """Seconds until the draft is written, after so many steps, if they go on as they went."""
        if self.seconds is not None:
            return max(0.0, self.seconds - self.passed) + self.after
        return self.passed / max(1, steps) * max(0, self._steps - steps) + self.after
