"""The model runner: turns plans into steps of the model, on one rank.

It keeps the state of every batch slot (token sampled last, tokens computed, page table, sampling settings), so a plan
names slots only. This is the runner of CPUs; steps run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import GREEDY, PlanLimits, PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.executor import StepResult
from lowlat.engine.item_rows import ItemPieces
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.plugin_steps import KernelSteps
from lowlat.engine.request import TokenLogprobs
from lowlat.engine.sampler import label_logprobs, sample_bursts, simulated_bursts, token_logprobs
from lowlat.engine.slot_table import SlotTable
from lowlat.engine.speculation import Speculation
from lowlat.layers.step import Segment, StepInputs, moved
from lowlat.models.base import Model, ModelCache, ReplayingCache
from lowlat.parallel.group import Communicator


def padded_rows(rows: int) -> int:
    """The rows that a step of `rows` is computed with: all numbers up to 16, then eight an octave (decision 0102)."""
    grain = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // grain) * grain


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
        self.min_rows = min_rows
        self.max_pages = limits.max_pages
        self._page_size = kv.layout.page_size
        self._lengths = [0] * limits.max_batch
        self._tokens = [0] * limits.max_batch
        self._sampling = [GREEDY] * limits.max_batch
        self._rules: list[LogitRules | None] = [None] * limits.max_batch
        self._table = SlotTable(limits.max_batch, limits.max_pages, self._page_size)
        self._window, self._window_pages = window, limits.max_window_pages
        self._window_table = SlotTable(limits.max_batch if window else 0, limits.max_pages, self._page_size)
        self._segments_only = has_state
        self._device = kv.keys[0].device if isinstance(kv, KVPool) and kv.keys else torch.device("cpu")
        # Models with state never group decodes, so they need no masks.
        self._dtype = kv.keys[0].dtype if isinstance(kv, KVPool) and kv.keys else torch.float32
        self._replays = [(0, 0)] * limits.max_batch
        """Of each slot: the position where its state begins, and the one from which its rows write to pages."""
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
            logits_MV = self.kernel_steps.run(plan, self._tokens, guesses, self._lengths, self._table.slots)
        if logits_MV is None or (speculation is not None and speculation.follows):
            inputs = moved(self._inputs(plan, guesses), self._device)
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
        filling = slots if self._segments_only else slots[:1]
        chunks = [PrefillChunk(slot, 0, [0] * context, False) for slot in filling]
        tables = [(slot, 0, pages) for slot in slots]
        # Window pages may be fewer; whose keys are read does not change the time.
        windows = [(slot, 0, [page % self._window_pages for page in pages]) for slot in slots if self._window]
        if fill or self._segments_only:
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
        scores, labels = self._score(plan, logits_MV[rows:]) if len(logits_MV) > rows else (None, None)
        bad = self._bad_scores(plan, logits_MV[rows:])
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

    def _score(
        self, plan: StepPlan, logits_MV: torch.Tensor
    ) -> tuple[list[list[TokenLogprobs]] | None, list[list[list[float]]] | None]:
        """Log-probabilities of the chunks' targets, then of their labels, whose rows `logits_MV` holds in order.

        On rank 0 only.
        """
        if self.communicator.shard.rank > 0:
            return None, None
        scores = []
        row = 0
        for chunk in plan.chunks:
            if chunk.targets:
                places = enumerate(chunk.targets, start=row)
                scores.append(
                    [token_logprobs(logits_MV[n], token, chunk.logprobs) for n, token in places if token >= 0]
                )
                row += len(chunk.targets)
        labels = []
        for chunk in plan.chunks:
            if chunk.read_rows:
                labels.append(label_logprobs(logits_MV[row : row + len(chunk.read_rows)], chunk.labels))
                row += len(chunk.read_rows)
        return scores, labels

    def _bad_scores(self, plan: StepPlan, logits_MV: torch.Tensor) -> list[int]:
        """Slots of chunks of which a row to score or to read, as `_score` has them in `logits_MV`, is not numbers."""
        slots = [chunk.slot for chunk in plan.chunks for _ in chunk.targets]
        slots += [chunk.slot for chunk in plan.chunks for _ in chunk.read_rows]
        if self.communicator.shard.rank > 0 or not slots:
            return []
        usable = logits_MV.amax(-1).isfinite().tolist()
        return sorted({slot for slot, good in zip(slots, usable, strict=True) if not good})

    def learn(self, plan: StepPlan) -> None:
        """Take in what a plan says of slots: requests that begin, page-table entries. `run` does so itself."""
        for slot, sampling in plan.begins:
            self._sampling[slot] = sampling
            # Rank 0 chooses for all.
            self._rules[slot] = LogitRules.of(sampling, slot) if self.rank == 0 else None
            if self.speculation is not None:
                self.speculation.begin(slot, sampling)
            self._table.begin(slot)
            if self._window:
                self._window_table.begin(slot)
            self._replays[slot] = (0, 0)
        for replay in plan.replays:
            assert isinstance(self.kv, ReplayingCache)
            self._replays[replay.slot] = (replay.start, replay.write_from)
            self.kv.begin_replay(replay.slot, replay.start, replay.before)
        for slot, first, pages in plan.pages:
            self._table.update(slot, first, pages)
        for slot, first, pages in plan.windows if self._window else ():
            self._window_table.update(slot, first, pages)

    def _inputs(self, plan: StepPlan, guesses: list[list[int]]) -> StepInputs:
        """The step's inputs. Wanted are the logits of sampling chunks' last rows, of decode rows, of scored rows."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[tuple[int, range, int]] = []
        sample_rows: list[int] = []
        score_rows: list[int] = []
        read_rows: list[int] = []
        groups: list[ItemPieces] = []
        singles: list[tuple[int, int]] = []
        written: list[tuple[int, int, int]] = []

        def add(slot: int, start: int, new: list[int]) -> range:
            rows = range(len(tokens), len(tokens) + len(new))
            tokens.extend(new)
            positions.extend(range(start, start + len(new)))
            written.append((slot, start, start + len(new)))
            return rows

        for chunk in plan.chunks:
            rows = add(chunk.slot, chunk.start, chunk.tokens)
            plain = rows
            if chunk.items is not None:
                plain = rows[: len(rows) - sum(chunk.items.lengths)]
                group = ItemPieces(chunk.items, range(plain.stop, rows.stop), chunk.slot, chunk.start + len(plain))
                positions[plain.stop :] = (group.offsets_T + chunk.items.query).tolist()
                groups.append(group)
            if plain:
                segments.append((chunk.slot, plain, chunk.start + len(plain)))
            score_rows.extend(rows if chunk.targets else ())
            read_rows.extend(rows[place] for place in chunk.read_rows)
            sample_rows.extend(rows[-1:] if chunk.sample else ())
        for slot, guessed in zip(plan.decodes, guesses, strict=True):
            length = self._lengths[slot]
            rows = add(slot, length, [self._tokens[slot], *guessed])
            sample_rows.extend(rows)
            if guessed or self._segments_only:
                segments.append((slot, rows, length + len(rows)))
            else:
                singles.append((slot, rows[0]))
        if len(singles) == 1:
            slot, row = singles[0]
            segments.append((slot, range(row, row + 1), self._lengths[slot] + 1))
            singles = []
        padding = [0] * (padded_rows(max(self.min_rows, len(tokens))) - len(tokens))
        step = StepInputs(
            tokens_R=torch.tensor(tokens + padding),
            positions_R=torch.tensor(positions + padding),
            write_slots=self._table.written(written),
            real_rows=len(tokens),
            segments=[self.segment(*segment) for segment in segments],
            decodes=self._table.decode_groups(singles, self._lengths, self._dtype),
            sample_rows=torch.tensor(sample_rows + score_rows + read_rows, dtype=torch.int64),
            items=[group.seen(self._table) for group in groups],
        )
        if self._window:
            table, window = self._window_table, self._window
            step.windowed = msgspec.structs.replace(
                step,
                write_slots=table.written(written),
                segments=[table.segment(*segment, window) for segment in segments],
                decodes=table.decode_groups(singles, self._lengths, self._dtype, window),
                items=[group.seen(table, window) for group in groups],
            )
        return step

    def segment(self, slot: int, rows: range, length: int) -> Segment:
        """Rows of a request whose last is token `length - 1` (see `speculative.proposer.Tables`)."""
        segment = self._table.segment(slot, rows, length)
        segment.floor, segment.write_from = self._replays[slot]
        return segment

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return self.communicator.shard.rank

    def sampling_of(self, slot: int) -> SlotSampling:
        """Settings of the request in a batch slot."""
        return self._sampling[slot]

    def write_slots(self, slot: int, start: int, count: int) -> np.ndarray:
        """KV slots of `count` tokens of a batch slot."""
        return self._table.slots[slot, start : start + count]
