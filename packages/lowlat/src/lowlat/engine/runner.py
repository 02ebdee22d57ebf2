"""The model runner: turns plans into steps of the model, on one rank.

It keeps the state of every batch slot (token sampled last, tokens computed, page table, sampling settings), so a plan
names slots only. This is the runner of CPUs; steps run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import GREEDY, PlanLimits, PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.chunk_scores import score_chunks
from lowlat.engine.executor import StepResult
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.plugin_steps import KernelSteps
from lowlat.engine.request import TokenLogprobs
from lowlat.engine.sampler import sample_bursts, simulated_bursts
from lowlat.engine.speculation import Speculation
from lowlat.engine.step_rows import StepRows
from lowlat.layers.step import moved
from lowlat.models.base import Model, ModelCache
from lowlat.parallel.group import Communicator


class ModelRunner:
    """Runs one model on one rank, step after step."""

    def __init__(
        self,
        model: Model,
        kv: ModelCache,
        limits: PlanLimits,
        communicator: Communicator,
        *,
        min_rows: int = 1,
        has_state: bool = False,
        window: int = 0,
    ) -> None:
        """`has_state`: the model keeps state for a request, and sees every request's rows as a segment of its own.
        `window`: tokens that a row sees in layers with a window, its own too; 0: those have no pages of their own."""
        self.model = model
        self.kv = kv
        self.communicator = communicator
        """The ranks that share the model."""
        self.rows = StepRows(kv, limits, min_rows=min_rows, segments_only=has_state, window=window)
        """Where requests' tokens lie, for drafts too."""
        self.max_pages = limits.max_pages
        self._page_size = kv.layout.page_size
        self._lengths = [0] * limits.max_batch
        self._tokens = [0] * limits.max_batch
        self._sampling = [GREEDY] * limits.max_batch
        self._rules: list[LogitRules | None] = [None] * limits.max_batch
        self._window_pages = limits.max_window_pages
        self._device = kv.keys[0].device if isinstance(kv, KVPool) and kv.keys else torch.device("cpu")
        self.kernel_steps: KernelSteps | None = None
        """Where a kernel library is installed: who is asked first."""
        self.speculation: Speculation | None = None
        """Where steps check guesses: who makes them."""

    @torch.inference_mode()
    def run(self, plan: StepPlan, guesses: list[list[int]] | None = None) -> StepResult:
        """Compute one step and sample its tokens; the slots' states advance.

        `guesses` of each decode slot come from `speculation` unless they are given.
        """
        self.learn(plan)
        speculation = self.speculation
        if guesses is None:
            guesses = [[] for _ in plan.decodes]
            if speculation is not None:
                guesses = speculation.guess(plan, self._tokens, self._lengths, self._sampling)
        started = time.perf_counter()
        for row, slot in plan.restores:
            self.kv.copy_state(row, slot)
        before = self._lengths.copy()
        logits_MV = inputs = None
        if self.kernel_steps is not None:
            logits_MV = self.kernel_steps.run(plan, self._tokens, guesses, self._lengths, self.rows.kv_slots)
        if logits_MV is None or (speculation is not None and speculation.follows):
            inputs = moved(self.rows.inputs(plan, self._tokens, self._lengths, guesses), self._device)
        if logits_MV is None:
            assert inputs is not None
            logits_MV = self.model.forward(inputs, self.kv)
        logits_MV = logits_MV.to("cpu")
        if speculation is not None and speculation.follows and inputs is not None:
            speculation.follow(inputs)
        for chunk in plan.chunks:
            before[chunk.slot] = chunk.start
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        slots = [chunk.slot for chunk in plan.chunks if chunk.sample] + plan.decodes
        result = self._result(plan, logits_MV, slots, [[]] * (len(slots) - len(guesses)) + guesses)
        for slot, row in plan.saves:
            if self._lengths[slot] // self._page_size > before[slot] // self._page_size:
                self.kv.copy_state(slot, row)
        if speculation is not None:
            result.spent, result.plain = speculation.time_step(plan, guesses, time.perf_counter() - started)
        return result

    def observer(self, slot: int) -> Callable[[int], None] | None:
        """What must hear of a slot's tokens when others than `run` choose them; None: nothing."""
        rule = self._rules[slot]
        return None if rule is None else rule.observe

    def answer_counts(self, slot: int) -> Mapping[int, int] | None:
        """How often the answer of a slot with rules holds each token; None: it has no rules."""
        rule = self._rules[slot]
        return None if rule is None else rule.answer

    def state(self) -> tuple[list[int], list[int]]:
        """Newest tokens and lengths of all slots."""
        return self._tokens.copy(), self._lengths.copy()

    def set_state(self, tokens: list[int], lengths: list[int]) -> None:
        """As `state` gives them, after steps that others ran on the same cache."""
        self._tokens, self._lengths = tokens.copy(), lengths.copy()

    def time_rows(self, rows: int, width: int, *, fill: bool = True) -> float:
        """Seconds of a decode step of `rows` rows, at most `width` a request, on pages that nobody owns. Not `fill`: a
        call with as many rows or more has filled the pages."""
        counts = [width] * (rows // width) + [rows % width] * (rows % width > 0)
        context = min(16, self.max_pages * self._page_size - width)
        pages = list(range(-(-(context + width) // self._page_size)))
        slots = list(range(len(counts)))
        begins = [(slot, GREEDY) for slot in slots]
        # All slots have the same pages: one fills them for all, unless each has state of its own.
        filling = slots if self.rows.segments_only else slots[:1]
        chunks = [PrefillChunk(slot, 0, [0] * context, False) for slot in filling]
        tables = [(slot, 0, pages) for slot in slots]
        # Window pages may be fewer; whose keys are read does not change the time.
        windows = [(slot, 0, [page % self._window_pages for page in pages]) for slot in slots if self.rows.window]
        if fill or self.rows.segments_only:
            self.run(StepPlan(0, begins, tables, chunks, [], windows=windows), [])
        for slot in slots:
            self._lengths[slot] = context
        started = time.perf_counter()
        self.run(StepPlan(1, [], [], [], slots), [[0] * (count - 1) for count in counts])
        return time.perf_counter() - started

    def _result(
        self, plan: StepPlan, logits_MV: torch.Tensor, slots: list[int], guesses: list[list[int]]
    ) -> StepResult:
        """Choose tokens for `slots`, whose rows come first in `logits_MV`, and advance the decode slots."""
        rows = len(slots) + sum(map(len, guesses))
        scores: list[list[TokenLogprobs]] | None = None
        labels: list[list[list[float]]] | None = None
        bad: list[int] = []
        if len(logits_MV) > rows and self.rank == 0:
            found = score_chunks(plan, logits_MV[rows:])
            scores, labels, bad = found.prompt, found.labels, found.bad_slots
        if not slots:
            return StepResult(plan.step, [], None, scores, label_logprobs=labels, bad_slots=bad)
        for slot in plan.decodes:
            self._lengths[slot] += 1
        if self.communicator.shard.rank > 0:
            told = self.communicator.broadcast(torch.empty((len(slots), 2), dtype=torch.int64)).tolist()
            for slot, (token, length) in zip(slots, told, strict=True):
                self._tokens[slot], self._lengths[slot] = token, length
            return StepResult(plan.step, [])
        bursts, logprobs = self._sample(logits_MV[:rows], slots, guesses)
        for slot, burst in zip(slots, bursts, strict=True):
            if burst:  # else the answer is over, or broken: the scheduler will say so
                self._tokens[slot] = burst[-1]
            length = self._lengths[slot] + max(0, len(burst) - 1)
            # Guesses may have ended an answer before a step that was launched ahead: it must not grow beyond its pages.
            self._lengths[slot] = min(length, self._sampling[slot].end - 1) if self._sampling[slot].end else length
        if self.communicator.shard.size > 1:
            # Rank 0 chooses and tells the others, so ranks can never disagree.
            self.communicator.broadcast(torch.tensor([[self._tokens[slot], self._lengths[slot]] for slot in slots]))
        if self.speculation is not None:
            self.speculation.judge(slots, self._sampling, bursts)
        tokens = [token for burst in bursts for token in burst]
        rules = [self._rules[slot] for slot in slots]
        over = {n: rule.over.error for n, rule in enumerate(rules) if rule is not None and rule.over is not None}
        bad += [slot for n, slot in enumerate(slots) if not bursts[n] and n not in over]
        counts = list(map(len, bursts)) if any(len(burst) != 1 for burst in bursts) else None
        guessed = sum(map(len, guesses))
        return StepResult(plan.step, tokens, logprobs, scores, counts, guessed, labels, over=over, bad_slots=bad)

    def _sample(
        self, logits_MV: torch.Tensor, slots: list[int], guesses: list[list[int]]
    ) -> tuple[list[list[int]], list[TokenLogprobs | None] | None]:
        """Choose the tokens of each slot's rows."""
        settings = [self._sampling[slot] for slot in slots]
        positions = [self._lengths[slot] for slot in slots]
        rules = [self._rules[slot] for slot in slots]
        if self.speculation is not None and self.speculation.simulated is not None:
            counts = self.speculation.simulate(slots, guesses)
            return simulated_bursts(logits_MV, settings, positions, rules, guesses, counts)
        return sample_bursts(logits_MV, settings, positions, rules, guesses)

    def learn(self, plan: StepPlan) -> None:
        """Take in what a plan says of slots: requests that begin, page-table entries. `run` does so itself."""
        for slot, sampling in plan.begins:
            self._sampling[slot] = sampling
            # Rank 0 chooses for all.
            self._rules[slot] = LogitRules.of(sampling, slot) if self.rank == 0 else None
            if self.speculation is not None:
                self.speculation.begin(slot, sampling)
        self.rows.learn(plan)

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return self.communicator.shard.rank

    def sampling_of(self, slot: int) -> SlotSampling:
        """Settings of the request in a batch slot."""
        return self._sampling[slot]
