"""`general`: lowlat's own model runner, one plan after another, as the engine runs it; the scheduler is not in it."""

from __future__ import annotations

from typing import Any

import torch

from lowlat.bench.arms.base import ArmUnavailableError, StepCase
from lowlat.bench.arms.torch_step import time_cpu
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.cache.groups import pages_for
from lowlat.engine.batch import PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.build import SetupError, build_rank
from lowlat.engine.config import EngineConfig
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.parallel.group import SingleRank

_GREEDY = SlotSampling(0.0, 0, 1.0, 0, -1)
_PAGE = 16


class GeneralArm:
    """Decode steps of the model runner, greedy, with the context set again before every series of timed steps.

    With `kernels`, that kernel library must have taken the decode steps over.
    """

    def __init__(self, case: StepCase, kernels: str | None = None) -> None:
        pages_each = pages_for(case.context + case.steps + 2, _PAGE)
        config = EngineConfig(
            model=case.model or case.shape.name,
            dtype=case.dtype,
            device=case.device,
            max_batch=case.requests,
            max_context=min(case.shape.max_context, pages_each * _PAGE),
            kv_tokens=pages_each * _PAGE * case.requests,
            page_size=_PAGE,
            threads=torch.get_num_threads(),
            low_latency="off" if kernels is None else "require",
            kernels=kernels,
        )
        checkpoint: Any = open_checkpoint(case.model) if case.model else RandomCheckpoint(case.shape, case.seed)
        try:
            parts = build_rank(config, checkpoint, SingleRank(), lambda *_: None)
        except (ValueError, SetupError, UnsupportedModelError) as error:
            what = f"lowlat's runner cannot run {case.shape.name} on {case.device}"
            raise ArmUnavailableError(f"{what}: {error}") from error
        if kernels is not None and parts.facts.kernels != kernels:
            raise ArmUnavailableError(f"{kernels} did not take the step over; `lowlat plugins check` says what refuses")
        self.runner = parts.runner
        self.note = "model runner with sampling, without scheduler"
        self._case = case
        self._step = 2
        self._fill(pages_each)

    def _run(self, plan: StepPlan) -> None:
        self.runner.run(plan)
        self._step += 1

    def _fill(self, pages_each: int) -> None:
        """Compute the context of every request, in chunks as the scheduler would."""
        for slot in range(self._case.requests):
            begins = [(slot, _GREEDY)]
            pages = [(slot, 0, list(range(slot * pages_each, (slot + 1) * pages_each)))]
            for start in range(0, self._case.context, 512):
                end = min(start + 512, self._case.context)
                tokens = [(start + i) % (self._case.shape.vocab - 3) + 3 for i in range(end - start)]
                chunk = PrefillChunk(slot, start, tokens, end == self._case.context)
                self._run(StepPlan(self._step, begins, pages, [chunk], []))
                begins, pages = [], []

    def rewind(self) -> None:
        """Set every request back to `context` tokens by computing its last prompt token again."""
        last = self._case.context - 1
        chunks = [PrefillChunk(slot, last, [3], True) for slot in range(self._case.requests)]
        self._run(StepPlan(self._step, [], [], chunks, []))

    def decode(self) -> None:
        """One decode step of all requests."""
        self._run(StepPlan(self._step, [], [], [], list(range(self._case.requests))))

    def measure(self) -> list[float]:
        """Microseconds of each step, from the plan to the sampled tokens on the host."""
        self.rewind()
        return time_cpu(self.decode, self._case.steps)

    def close(self) -> None:
        """Drop the model."""
        del self.runner
