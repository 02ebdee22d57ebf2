"""How many guesses a device's steps check. They are made inside the step, so steps are queued ahead as without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lowlat.engine.batch import SlotSampling
from lowlat.speculative.acceptance import Acceptance
from lowlat.speculative.budget import expected_tokens
from lowlat.speculative.device_draft import DeviceDraft
from lowlat.speculative.proposer import DraftRequest
from lowlat.speculative.step_times import StepTimes

_TRY_AGAIN = 8
"""Every so many steps the widest is run, worth its time or not: a text may become easy again."""


class DeviceSpeculation:
    """Decides what a `DeviceRunner`'s steps check, and learns what came of it. `draft` makes guesses."""

    def __init__(
        self,
        *,
        width: int,
        adaptive: bool,
        draft: DeviceDraft,
        simulated: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`width`: most rows of a request. `adaptive`: fewer where that is faster. `simulated`: tokens a step that
        count as right, whatever is; for benchmarks only."""
        self.draft = draft
        self.width, self.adaptive, self.simulated, self.clock = width, adaptive, simulated, clock
        self.widths = step_widths(width, adaptive)
        self.times: dict[int, StepTimes] = {}
        """By requests of a step: its seconds by rows of a request."""
        self._acceptance = Acceptance()
        self._steps = 0
        self._simulated_steps: dict[int, int] = {}
        self._last = 0.0

    def begin(self, slot: int, sampling: SlotSampling) -> None:
        """A request takes a slot."""
        if sampling.width > 1:
            self._acceptance.begin(slot)
            self.draft.begin(slot, [*sampling.prompt, *sampling.answer])

    def plan(self, requests: Sequence[DraftRequest], size: int) -> int:
        """Rows of each request in a step of these, padded to `size`."""
        if all(request.most < 1 for request in requests):
            return 1
        if not self.adaptive or size not in self.times or self.simulated is not None:
            return self.width
        self._steps += 1
        if self._steps % _TRY_AGAIN == 0:
            return self.width
        chances = [self._acceptance.chances(of.state, 0, of.most) if of.most > 0 else [] for of in requests]
        return self._best(chances, size)

    def simulate(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Tokens that each request's rows shall bring, as `Speculation.simulate`."""
        assert self.simulated is not None
        counts = []
        for request in requests:
            count = 1
            if request.most > 0:
                steps = self._simulated_steps[request.state] = self._simulated_steps.get(request.state, 0) + 1
                count = int(steps * self.simulated + 1e-9) - int((steps - 1) * self.simulated + 1e-9)
            counts.append(min(count, request.most + 1))
        return counts

    def judge(self, slot: int, burst: list[int], rows: int, width: int) -> None:
        """Learn from the tokens that a step brought a request that speculates: of its `width` rows it had `rows`."""
        if burst and width > 1 and self.simulated is None:
            # The guesses stay on the device: those before the last token were right, the next one, if any, was not. No
            # guess at all counts as a wrong one.
            wrong = [-1] if len(burst) < max(rows, 2) else []
            self._acceptance.judge(slot, 0, burst[:-1] + wrong, burst)

    def time_step(self, launched: float, size: int, width: int) -> tuple[float, float]:
        """A step's result is there. Returns the seconds since the result before it, or since its launch if that was
        later, and what a step without guesses takes."""
        now = self.clock()
        seconds, self._last = now - max(launched, self._last), now
        times = self.times.get(size)
        if times is None:
            return 0.0, 0.0
        times.observe(width, seconds)
        return seconds, times(1) if width > 1 else seconds

    def _best(self, chances: list[list[float]], size: int) -> int:
        """The width that brings the most tokens a second; of equals the smallest."""
        times = self.times[size]

        def rate(width: int) -> float:
            return sum(expected_tokens(of[: width - 1]) for of in chances) / max(times(width), 1e-12)

        return max(self.widths, key=rate)


def step_widths(width: int, adaptive: bool) -> list[int]:
    """Rows of a request that steps are made for: one, and the given width; where the width adapts, also powers of two
    between."""
    between = [1 << n for n in range(1, width.bit_length()) if 1 << n < width] if adaptive else []
    return sorted({1, *between, width})
