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
from lowlat.speculative.acceptance import DOUBTFUL, HOPEFUL, Acceptance
from lowlat.speculative.budget import plan_guesses
from lowlat.speculative.ngram import SURE_RUN, NgramProposer
from lowlat.speculative.proposer import DraftRequest, Proposal, Proposer
from lowlat.speculative.step_times import StepTimes

_TRY_AGAIN = 16
"""After so many steps a draft is asked, worth its time or not; twice as many each time that it was not."""
_LONGEST_WAIT = 64


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
        first: NgramProposer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`width`: most rows of a request. `adaptive`: fewer where that is faster, else as many as are proposed.
        `simulated`: tokens a step that count as right, whatever is; for benchmarks only. `first`: who is asked before
        the proposer, and believed where a long run occurred before."""
        self.width = width
        self.simulated = simulated
        self.times: StepTimes | None = None
        self._proposer = proposer
        self._first = first if simulated is None and communicator.shard.rank == 0 else None
        self._communicator = communicator
        self._adaptive = adaptive
        self._clock = clock
        self._acceptance = Acceptance(HOPEFUL if proposer.costs_time else DOUBTFUL)
        self._proposals: dict[int, Proposal] = {}
        """Of the step under way, by slot."""
        self._simulated_steps: dict[int, int] = {}
        self._guess_seconds = 0.0
        self._asked_seconds = 0.0
        self._silent = 0
        """Steps in which a draft was not asked since it last was."""
        self._wait = _TRY_AGAIN

    @property
    def follows(self) -> bool:
        """Whether `follow` wants to see every step on this rank."""
        return self._proposer.follows and self._communicator.shard.rank == 0

    def begin(self, slot: int, sampling: SlotSampling) -> None:
        """A request takes a slot."""
        if self._communicator.shard.rank == 0 and sampling.width > 1:
            self._acceptance.begin(slot)
            for proposer in (self._proposer, self._first):
                if proposer is not None:
                    proposer.begin(slot, [*sampling.prompt, *sampling.answer])

    def follow(self, step: StepInputs) -> None:
        """The target has computed these rows."""
        self._proposer.follow(step)

    def guess(
        self, plan: StepPlan, tokens: Sequence[int], lengths: Sequence[int], sampling: Sequence[SlotSampling]
    ) -> list[list[int]]:
        """For each decode slot, guesses of the tokens after its next one, which this step is to check."""
        if not plan.decodes:
            return []
        most = [self._most(sampling[slot], lengths[slot]) for slot in plan.decodes]
        found = self._look_up(plan.decodes, tokens, lengths, most)
        wanted = self._agree(
            plan.decodes, [0 if slot in found else count for slot, count in zip(plan.decodes, most, strict=True)]
        )
        requests = [
            DraftRequest(tokens[slot], lengths[slot], slot, most)
            for slot, most in zip(plan.decodes, wanted, strict=True)
            if most > 0
        ]
        proposals = found | (self._ask(requests) if requests else {})
        guesses = self._choose(plan, proposals, wanted) if self._communicator.shard.rank == 0 else []
        return self._share(guesses, len(plan.decodes))

    def judge(self, slots: Sequence[int], sampling: Sequence[SlotSampling], bursts: Sequence[list[int]]) -> None:
        """Learn from the tokens that a step chose; on rank 0."""
        for slot, burst in zip(slots, bursts, strict=True):
            if sampling[slot].width > 1 and burst:
                proposal = self._proposals.pop(slot, None)
                if proposal is not None:
                    self._acceptance.judge(slot, proposal.kind, proposal.tokens, burst)
                    if len(burst) > 2:
                        self._silent = self._wait = _TRY_AGAIN  # a text that has become easy: ask again at once
                self._proposer.observe(slot, burst)
                if self._first is not None:
                    self._first.observe(slot, burst)

    def time_step(self, plan: StepPlan, guesses: Sequence[Sequence[int]], seconds: float) -> tuple[float, float]:
        """Take note of a step's time. Returns what its decoding took, and what it would have without guesses."""
        if plan.chunks or not plan.decodes or self.times is None:
            return 0.0, 0.0
        rows = plan.rows + sum(map(len, guesses))
        self.times.observe(rows, seconds)
        return seconds + self._asked_seconds, self.times(plan.rows) if rows > plan.rows else seconds

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

    def _look_up(
        self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int], most: Sequence[int]
    ) -> dict[int, Proposal]:
        """Proposals by slot of those where a long run occurred before."""
        if self._first is None:
            return {}
        requests = [
            DraftRequest(tokens[slot], lengths[slot], slot, count)
            for slot, count in zip(slots, most, strict=True)
            if count > 0
        ]
        proposals = self._first.propose(requests)
        return {request.state: of for request, of in zip(requests, proposals, strict=True) if of.kind >= SURE_RUN}

    @staticmethod
    def _most(setting: SlotSampling, length: int) -> int:
        return max(0, min(setting.width, setting.end - length) - 1)

    def _agree(self, slots: Sequence[int], wanted: list[int]) -> list[int]:
        """How many guesses to ask for, of each request; all ranks must agree where all take part."""
        told = self._worth_asking(slots, wanted) if self._communicator.shard.rank == 0 else [0] * len(wanted)
        if self._communicator.shard.size == 1 or not self._proposer.needs_ranks:
            return told
        found: list[int] = self._communicator.broadcast(torch.tensor(told)).tolist()
        return found

    def _ask(self, requests: list[DraftRequest]) -> dict[int, Proposal]:
        """Proposals by slot."""
        started = self._clock()
        proposals = self._proposer.propose(requests)
        self._asked_seconds = seconds = self._clock() - started
        each = seconds / max(request.most for request in requests) if self._proposer.sequential else seconds
        self._guess_seconds = 0.9 * self._guess_seconds + 0.1 * each if self._guess_seconds else each
        return {
            request.state: Proposal(of.tokens[: request.most], of.kind, of.chances and of.chances[: request.most])
            for request, of in zip(requests, proposals, strict=True)
        }

    def _worth_asking(self, slots: Sequence[int], wanted: list[int]) -> list[int]:
        """How many guesses would pay for their own making, if they are as good as the last ones. Now and then all are
        asked for even so, since a text may become easy again."""
        self._asked_seconds = 0.0
        if not any(wanted) or not (
            self._adaptive and self._proposer.costs_time and self.times is not None and self._guess_seconds
        ):
            return wanted
        times, rows, each = self.times, len(wanted), self._guess_seconds
        expected = [
            self._acceptance.chances(slot, 0, most) if most > 0 else []
            for slot, most in zip(slots, wanted, strict=True)
        ]
        if self._proposer.sequential:
            # The draft goes on for all requests until the last of them has its guesses: at most one a row beside.
            counts = plan_guesses(expected, lambda count: times(count) + each * (count - rows) / rows, rows)
        else:
            counts = wanted if any(plan_guesses(expected, times, rows, each)) else [0] * rows
        if any(counts):
            self._silent, self._wait = 0, _TRY_AGAIN
            return counts
        self._silent += 1
        if self._silent < self._wait:
            return counts
        self._silent, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return wanted

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
            of.chances or (self._acceptance.chances(slot, of.kind, len(of.tokens)) if of.tokens else [])
            for slot, of in zip(plan.decodes, found, strict=True)
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
