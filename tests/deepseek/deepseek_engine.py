"""DeepSeek under the engine's own scheduler: a runner that gives every request a state row beside its pages."""

from __future__ import annotations

import types

import torch

from lowlat.engine.batch import PlanLimits, StepPlan
from lowlat.engine.runner import ModelRunner
from lowlat.layers.step import Segment, StepInputs
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.model import DeepseekV4
from lowlat.models.deepseek_v4.step import StateSegment
from lowlat.parallel.group import SingleRank


class _Served:
    """The model as the runner calls it."""

    def __init__(self, model: DeepseekV4, caches: DeepseekCaches) -> None:
        self.model, self.caches = model, caches
        self.widths: list[tuple[int, ...]] = []

    def forward(self, step: StepInputs, kv: object) -> torch.Tensor:
        self.widths.append(tuple(segment.rows for segment in step.segments))
        return self.model.compute(step, self.caches).float()


class StateRunner(ModelRunner):
    """Every request's rows are a segment of its own, and its batch slot is its state row."""

    def __init__(self, model: DeepseekV4, limits: PlanLimits, *, pages: int, page_size: int) -> None:
        # One page more, for padding rows, as the KV pool has.
        self.caches = DeepseekCaches(
            model.config, model.numerics, pages=pages + 1, page_size=page_size, states=limits.max_batch
        )
        self.served = _Served(model, self.caches)
        kv = types.SimpleNamespace(layout=types.SimpleNamespace(page_size=page_size))
        super().__init__(self.served, kv, limits, SingleRank(), min_rows=3)  # type: ignore[arg-type]
        self._slot_of_segment = -1

    def _segment(self, slot: int, first: int, rows: int, length: int) -> Segment:
        segment = super()._segment(slot, first, rows, length)
        return StateSegment(
            first=segment.first, rows=rows, length=length, slots_L=segment.slots_L.clone(), run=segment.run, state=slot
        )

    def _inputs(self, plan: StepPlan) -> tuple[StepInputs, list[int]]:
        if len(plan.decodes) < 2:
            return super()._inputs(plan)
        # Decode rows become segments: the base class groups them for attention kernels, which needs equal addressing.
        grouped = self._decode_groups
        segments: list[Segment] = []

        def as_segments(slots: list[int], first_row: int) -> list:
            segments.extend(
                self._segment(slot, first_row + index, 1, self._lengths[slot]) for index, slot in enumerate(slots)
            )
            return []

        self._decode_groups = as_segments  # type: ignore[method-assign]
        try:
            step, slots = super()._inputs(plan)
        finally:
            self._decode_groups = grouped  # type: ignore[method-assign]
        step.segments.extend(segments)
        return step, slots
