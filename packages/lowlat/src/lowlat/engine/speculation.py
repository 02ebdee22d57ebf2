"""Speculation inside the runner: asks the proposer, decides how many guesses a step checks, learns what came of them.

Which guesses are checked never changes an answer, only how fast it comes. Rank 0 decides and tells the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from lowlat.engine.batch import SlotSampling, StepPlan
from lowlat.layers.step import StepInputs
from lowlat.parallel.group import Communicator
from lowlat.speculative.acceptance import Acceptance
from lowlat.speculative.budget import plan_guesses
from lowlat.speculative.proposer import DraftRequest, Proposal, Proposer
from lowlat.speculative.step_times import StepTimes

_TRY_AGAIN = 16
"""Steps after which a draft that was not worth its time is asked again."""


class Speculation:
    """The guesses of all batch slots."""

    def __init__(
        self,
        proposer: Proposer,
        communicator: Communicator,
        *,
        width: int,
        adaptive: bool,
        simulated: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`width`: most rows of a request. `adaptive`: fewer where that is faster, else as many as are proposed.
        `simulated`: tokens a step that count as right, whatever is; for benchmarks only."""
        self.width = width
        self.simulated = simulated
        self.times: StepTimes | None = None
        self._proposer = proposer
        self._communicator = communicator
        self._adaptive = adaptive
        self._clock = clock
        self._acceptance = Acceptance()
        self._proposals: dict[int, Proposal] = {}
        """Of the step under way, by slot."""
        self._simulated_steps: dict[int, int] = {}
        self._draft_seconds = 0.0
        self._not_asked = 0

    @property
    def follows(self) -> bool:
        """Whether `follow` wants to see every step on this rank."""
        return self._proposer.follows

    def begin(self, slot: int, sampling: SlotSampling) -> None:
        """A request takes a slot."""
        if self._communicator.shard.rank == 0 and sampling.width > 1:
            self._acceptance.begin(slot)
            self._proposer.begin(slot, [*sampling.prompt, *sampling.answer])

    def follow(self, step: StepInputs) -> None:
        """The target has computed these rows."""
        self._proposer.follow(step)

    def guess(
        self, plan: StepPlan, tokens: Sequence[int], lengths: Sequence[int], sampling: Sequence[SlotSampling]
    ) -> list[list[int]]:
        """For each decode slot, guesses of the tokens after its next one, which this step is to check."""
        if not plan.decodes:
            return []
        wanted = self._agree([self._most(sampling[slot], lengths[slot]) for slot in plan.decodes])
        requests = [
            DraftRequest(tokens[slot], lengths[slot], slot, most)
            for slot, most in zip(plan.decodes, wanted, strict=True)
            if most > 0
        ]
        proposals = self._ask(requests) if requests else {}
        guesses = self._choose(plan, proposals, wanted) if self._communicator.shard.rank == 0 else []
        return self._share(guesses, len(plan.decodes))

    def judge(self, slots: Sequence[int], sampling: Sequence[SlotSampling], bursts: Sequence[list[int]]) -> None:
        """Learn from the tokens that a step chose; on rank 0."""
        for slot, burst in zip(slots, bursts, strict=True):
            if sampling[slot].width > 1 and burst:
                proposal = self._proposals.pop(slot, None)
                if proposal is not None:
                    self._acceptance.judge(slot, proposal.kind, proposal.tokens, burst)
                self._proposer.observe(slot, burst)

    def time_step(self, plan: StepPlan, guesses: Sequence[Sequence[int]], seconds: float) -> tuple[float, float]:
        """Take note of a step's time. Returns what its decoding took, and what it would have without guesses."""
        if plan.chunks or not plan.decodes or self.times is None:
            return 0.0, 0.0
        rows = plan.rows + sum(map(len, guesses))
        self.times.observe(rows, seconds)
        spent = seconds + (self._draft_seconds if self._not_asked == 0 else 0.0)
        return spent, self.times(plan.rows) if rows > plan.rows else seconds

    def simulate(self, slots: Sequence[int], guesses: Sequence[Sequence[int]]) -> list[int]:
        """Tokens that each slot's rows shall bring, so that steps that may have enough rows bring `simulated` tokens on
        average: exactly so after every step, to within one token."""
        assert self.simulated is not None
        counts = []
        for slot, guessed in zip(slots, guesses, strict=True):
            count = 1
            if guessed:
                # The sequence of whole numbers nearest below the line of this slope, from a fixed start.
                steps = self._simulated_steps[slot] = self._simulated_steps.get(slot, 0) + 1
                count = int(steps * self.simulated + 1e-9) - int((steps - 1) * self.simulated + 1e-9)
            counts.append(min(count, len(guessed) + 1))
        return counts

    @staticmethod
    def _most(setting: SlotSampling, length: int) -> int:
        return max(0, min(setting.width, setting.end - length) - 1)

    def _agree(self, wanted: list[int]) -> list[int]:
        """What rank 0 wants, where all ranks must know before anything is proposed."""
        if self._communicator.shard.size == 1 or not self._proposer.needs_ranks:
            return wanted
        if self._communicator.shard.rank == 0 and not self._worth_asking(wanted):
            wanted = [0] * len(wanted)
        found: list[int] = self._communicator.broadcast(torch.tensor(wanted)).tolist()
        return found

    def _ask(self, requests: list[DraftRequest]) -> dict[int, Proposal]:
        """Proposals by slot; on rank 0, and on others where they must take part."""
        alone = self._communicator.shard.size == 1 or not self._proposer.needs_ranks
        if alone and (self._communicator.shard.rank > 0 or not self._worth_asking([r.most for r in requests])):
            return {}
        started = self._clock()
        proposals = self._proposer.propose(requests)
        seconds = self._clock() - started
        self._draft_seconds = 0.9 * self._draft_seconds + 0.1 * seconds if self._draft_seconds else seconds
        return {
            request.state: Proposal(of.tokens[: request.most], of.kind, of.chances and of.chances[: request.most])
            for request, of in zip(requests, proposals, strict=True)
        }

    def _worth_asking(self, wanted: list[int]) -> bool:
        """Whether guesses as good as the last ones would pay for their own making. Now and then a draft is asked even
        so, since a text may become easy again."""
        if not (self._adaptive and self._proposer.costs_time and self.times is not None and self._draft_seconds):
            return True
        expected = [self._acceptance.overall(most) for most in wanted]
        self._not_asked += 1
        worth = any(plan_guesses(expected, self.times, len(wanted), self._draft_seconds))
        if worth or self._not_asked >= _TRY_AGAIN:
            self._not_asked = 0
        return self._not_asked == 0

    def _choose(self, plan: StepPlan, proposals: dict[int, Proposal], wanted: list[int]) -> list[list[int]]:
        """The guesses that are worth a row."""
        found = [proposals.get(slot, _NONE) for slot in plan.decodes]
        if self.simulated is not None:
            self._proposals = {}
            return [[*of.tokens, *[0] * most][:most] for of, most in zip(found, wanted, strict=True)]
        self._proposals = proposals
        if not self._adaptive or self.times is None:
            return [proposal.tokens for proposal in found]
        chances = [
            proposal.chances or self._acceptance.chances(slot, proposal.kind, len(proposal.tokens))
            for slot, proposal in zip(plan.decodes, found, strict=True)
        ]
        counts = plan_guesses(chances, self.times, plan.rows)
        return [proposal.tokens[:count] for proposal, count in zip(found, counts, strict=True)]

    def _share(self, guesses: list[list[int]], requests: int) -> list[list[int]]:
        """Rank 0's guesses on every rank."""
        if self._communicator.shard.size == 1:
            return guesses
        padded = torch.full((requests, self.width), -1)
        for row, guessed in enumerate(guesses):
            padded[row, : len(guessed)] = torch.tensor(guessed, dtype=torch.int64)
        rows = self._communicator.broadcast(padded).tolist()
        return [[token for token in row if token >= 0] for row in rows]


_NONE = Proposal()
