"""The model runner: turns plans into steps of the model, on one rank.

It keeps the state of every batch slot (token sampled last, tokens computed, page table, sampling settings), so a plan
names slots only. This is the runner of CPUs; steps run eagerly.
"""

from __future__ import annotations

import numpy as np
import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import GREEDY, PlanLimits, StepPlan
from lowlat.engine.executor import StepResult
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.plugin_steps import KernelSteps
from lowlat.engine.request import TokenLogprobs
from lowlat.engine.sampler import sample, token_logprobs
from lowlat.layers.step import DecodeGroup, Segment, StepInputs
from lowlat.models.base import Model
from lowlat.parallel.group import Communicator


class ModelRunner:
    """Runs one model on one rank, step after step."""

    def __init__(
        self, model: Model, kv: KVPool, limits: PlanLimits, communicator: Communicator, *, min_rows: int = 1
    ) -> None:
        self.model = model
        self.kv = kv
        self._communicator = communicator
        self._min_rows = min_rows
        self.max_pages = limits.max_pages
        self._page_size = kv.layout.page_size
        self._lengths = [0] * limits.max_batch
        self._tokens = [0] * limits.max_batch
        self._sampling = [GREEDY] * limits.max_batch
        self._rules: list[LogitRules | None] = [None] * limits.max_batch
        # KV slot of every token of every batch slot: the page tables, spelled out.
        self._kv_slots = np.zeros((limits.max_batch, limits.max_pages * self._page_size), dtype=np.int64)
        self._in_order = [True] * limits.max_batch
        """Whether all pages of a batch slot are neighbours in memory, in order."""
        self.kernel_steps: KernelSteps | None = None
        """Where a kernel library is installed: who is asked first."""

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step and sample its tokens; the slots' states advance."""
        self._update(plan)
        logits_MV = None
        if self.kernel_steps is not None:
            logits_MV = self.kernel_steps.run(plan, self._tokens, self._lengths, self._kv_slots)
        if logits_MV is not None:
            slots = plan.decodes
            for slot in slots:
                self._lengths[slot] += 1
        else:
            step, slots = self._inputs(plan)
            logits_MV = self.model.forward(step, self.kv)
        prompt_logprobs = self._score(plan, logits_MV[len(slots) :]) if len(logits_MV) > len(slots) else None
        if not slots:
            return StepResult(plan.step, [], None, prompt_logprobs)
        tokens, logprobs = self._sample(logits_MV[: len(slots)], slots)
        for slot, token in zip(slots, tokens, strict=True):
            self._tokens[slot] = token
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs)

    def _sample(self, logits_MV: torch.Tensor, slots: list[int]) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Rank 0 chooses and tells the others, so ranks can never disagree."""
        if self._communicator.shard.rank > 0:
            return self._communicator.broadcast(torch.empty(len(slots), dtype=torch.int64)).tolist(), None
        settings = [self._sampling[slot] for slot in slots]
        positions = [self._lengths[slot] for slot in slots]
        tokens, logprobs = sample(logits_MV, settings, positions, [self._rules[slot] for slot in slots])
        if self._communicator.shard.size > 1:
            self._communicator.broadcast(torch.tensor(tokens))
        return tokens, logprobs

    def _score(self, plan: StepPlan, logits_MV: torch.Tensor) -> list[list[TokenLogprobs]] | None:
        """Log-probabilities of the chunks' targets, whose rows `logits_MV` holds in order; on rank 0 only."""
        if self._communicator.shard.rank > 0:
            return None
        scores = []
        row = 0
        for chunk in plan.chunks:
            if chunk.targets:
                places = enumerate(chunk.targets, start=row)
                scores.append(
                    [token_logprobs(logits_MV[n], token, chunk.logprobs) for n, token in places if token >= 0]
                )
                row += len(chunk.targets)
        return scores

    def _update(self, plan: StepPlan) -> None:
        for slot, sampling in plan.begins:
            self._sampling[slot] = sampling
            self._rules[slot] = LogitRules.of(sampling)
            self._in_order[slot] = True
        size = self._page_size
        for slot, first, pages in plan.pages:
            starts = np.asarray(pages, dtype=np.int64) * size
            filled = (starts[:, None] + np.arange(size)).reshape(-1)
            row = self._kv_slots[slot]
            row[first * size : first * size + len(filled)] = filled
            low = max(0, first - 1) * size
            steps = np.diff(row[low : first * size + len(filled)])
            self._in_order[slot] = self._in_order[slot] and bool((steps == 1).all())

    def _inputs(self, plan: StepPlan) -> tuple[StepInputs, list[int]]:
        """The step's inputs, and the batch slots that sample, in order."""
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        sample_rows: list[int] = []
        score_rows: list[int] = []
        slots: list[int] = []
        write: list[np.ndarray] = []
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            segments.append(self._segment(chunk.slot, len(tokens), len(chunk.tokens), end))
            if chunk.targets:
                score_rows.extend(range(len(tokens), len(tokens) + len(chunk.tokens)))
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.start, end))
            write.append(self._kv_slots[chunk.slot, chunk.start : end])
            self._lengths[chunk.slot] = end
            if chunk.sample:
                sample_rows.append(len(tokens) - 1)
                slots.append(chunk.slot)
        first_decode = len(tokens)
        for slot in plan.decodes:
            position = self._lengths[slot]
            tokens.append(self._tokens[slot])
            positions.append(position)
            write.append(self._kv_slots[slot, position : position + 1])
            self._lengths[slot] = position + 1
            sample_rows.append(len(tokens) - 1)
            slots.append(slot)
        real_rows = len(tokens)
        padding = max(0, self._min_rows - real_rows)
        decodes: list[DecodeGroup] = []
        if len(plan.decodes) == 1:
            slot = plan.decodes[0]
            segments.append(self._segment(slot, first_decode, 1, self._lengths[slot]))
        elif plan.decodes:
            decodes = self._decode_groups(plan.decodes, first_decode)
        step = StepInputs(
            tokens_R=torch.tensor(tokens + [0] * padding),
            positions_R=torch.tensor(positions + [0] * padding),
            write_slots=torch.from_numpy(np.concatenate(write)),
            real_rows=real_rows,
            segments=segments,
            decodes=decodes,
            sample_rows=torch.tensor(sample_rows + score_rows, dtype=torch.int64),
        )
        return step, slots

    def _segment(self, slot: int, first: int, rows: int, length: int) -> Segment:
        kv_slots = self._kv_slots[slot, :length]
        run = int(kv_slots[0]) if self._in_order[slot] else -1
        return Segment(first, rows, length, torch.from_numpy(kv_slots), run)

    def _decode_groups(self, slots: list[int], first_row: int) -> list[DecodeGroup]:
        """Gather decode rows whose lengths differ at most by a factor of two, so that padding stays small."""
        order = sorted(range(len(slots)), key=lambda index: self._lengths[slots[index]])
        groups: list[DecodeGroup] = []
        begin = 0
        for end in range(1, len(order) + 1):
            shortest = self._lengths[slots[order[begin]]]
            if end < len(order) and self._lengths[slots[order[end]]] <= 2 * shortest:
                continue
            members = sorted(order[begin:end])
            groups.append(self._decode_group([slots[index] for index in members], [first_row + i for i in members]))
            begin = end
        return groups

    def _decode_group(self, slots: list[int], rows: list[int]) -> DecodeGroup:
        lengths = np.array([self._lengths[slot] for slot in slots])
        longest = int(lengths.max())
        kv_slots = self._kv_slots[slots, :longest]
        mask = None
        if int(lengths.min()) < longest:
            seen = np.arange(longest) < lengths[:, None]
            # Where a request has no token, its first one is read and masked: that slot was surely written.
            kv_slots = np.where(seen, kv_slots, kv_slots[:, :1])
            dtype = self.kv.keys[0].dtype
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
            mask = mask[:, None, None, :]
        return DecodeGroup(torch.tensor(rows), torch.from_numpy(np.ascontiguousarray(kv_slots)), mask)
