"""What a device's steps check: guesses of a draft on the device, or of n-grams on the host; and how many.

A draft on the device makes its guesses inside the step, so steps are queued ahead as without guesses. N-grams need the
tokens of the step before, so the host waits for each step before it launches the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from lowlat.engine.batch import SlotSampling
from lowlat.speculative.acceptance import DOUBTFUL, HOPEFUL, Acceptance
from lowlat.speculative.budget import expected_tokens
from lowlat.speculative.device_draft import DeviceDraft
from lowlat.speculative.ngram import NgramProposer
from lowlat.speculative.proposer import DraftRequest, Proposal
from lowlat.speculative.step_times import StepTimes

_TRY_AGAIN = 16
"""Every so many steps the widest is run, worth its time or not: a text may become easy again."""


class Checks(msgspec.Struct):
    """What a step checks."""

    width: int
    """Rows of each request."""
    proposals: list[Proposal] | None = None
    """Guesses of each request, made on the host; None: the draft's on the device, `width` - 1 for each."""


class DeviceSpeculation:
    """Decides what a `DeviceRunner`'s steps check, and learns what came of it. `draft` or `ngrams` makes guesses."""

    def __init__(
        self,
        *,
        width: int,
        adaptive: bool,
        draft: DeviceDraft | None = None,
        ngrams: NgramProposer | None = None,
        simulated: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`width`: most rows of a request. `adaptive`: fewer where that is faster. `simulated`: tokens a step that
        count as right, whatever is; for benchmarks only."""
        assert (draft is None) != (ngrams is None)
        self.draft, self.ngrams = draft, ngrams
        self.width, self.adaptive, self.simulated, self.clock = width, adaptive, simulated, clock
        self.widths = step_widths(width, adaptive)
        self.times: dict[int, StepTimes] = {}
        """By requests of a step: its seconds by rows of a request."""
        self._acceptance = Acceptance(DOUBTFUL if draft is None else HOPEFUL)
        self._steps = 0
        self._simulated_steps: dict[int, int] = {}
        self._last = 0.0

    def begin(self, slot: int, sampling: SlotSampling) -> None:
        """A request takes a slot."""
        if sampling.width > 1:
            self._acceptance.begin(slot)
            if self.ngrams is not None:
                self.ngrams.begin(slot, [*sampling.prompt, *sampling.answer])

    def plan(self, requests: Sequence[DraftRequest], size: int) -> Checks:
        """What a step of these requests, padded to `size`, checks."""
        if all(request.most < 1 for request in requests):
            return Checks(1, None if self.ngrams is None else [Proposal() for _ in requests])
        if self.ngrams is None:
            return Checks(self._draft_width(requests, size))
        asked = [request for request in requests if request.most > 0]
        found = dict(zip((request.state for request in asked), self.ngrams.propose(asked), strict=True))
        proposals = [found.get(request.state, Proposal()) for request in requests]
        if self.simulated is not None:
            proposals = [
                Proposal([*of.tokens, *[0] * request.most][: min(request.most, self.width - 1)])
                for request, of in zip(requests, proposals, strict=True)
            ]
            return Checks(self.width, proposals)
        longest = max(len(proposal.tokens) for proposal in proposals)
        if self.adaptive and size in self.times:
            chances = [
                self._acceptance.chances(request.state, of.kind, len(of.tokens)) if of.tokens else []
                for request, of in zip(requests, proposals, strict=True)
            ]
            return Checks(self._best(chances, size), proposals)
        return Checks(next(width for width in self.widths if width > longest), proposals)

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

    def judge(self, slot: int, burst: list[int], rows: int, proposal: Proposal | None) -> None:
        """Learn from the tokens that a step of `rows` rows brought a request that speculates."""
        if not burst:
            return
        if self.simulated is None:
            if proposal is not None:
                self._acceptance.judge(slot, proposal.kind, proposal.tokens, burst)
            elif rows > 1:
                # The guesses stay on the device: those before the last token were right, the next one, if any, was not.
                wrong = [-1] if len(burst) < rows else []
                self._acceptance.judge(slot, 0, burst[:-1] + wrong, burst)
        if self.ngrams is not None:
            self.ngrams.observe(slot, burst)

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

    def _draft_width(self, requests: Sequence[DraftRequest], size: int) -> int:
        if not self.adaptive or size not in self.times or self.simulated is not None:
            return self.width
        self._steps += 1
        if self._steps % _TRY_AGAIN == 0:
            return self.width
        chances = [self._acceptance.chances(of.state, 0, of.most) if of.most > 0 else [] for of in requests]
        return self._best(chances, size)

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
