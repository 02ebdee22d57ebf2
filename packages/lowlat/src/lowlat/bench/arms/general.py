"""`general`: lowlat's own model runner, one plan after another, as the engine runs it; the scheduler is not in it."""

from __future__ import annotations

import gc
import time
from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
import torch

from lowlat.bench.arms.base import ArmUnavailableError, StepCase
from lowlat.bench.arms.torch_step import time_cpu
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.cache.groups import pages_for
from lowlat.engine.batch import GREEDY, PrefillChunk, StepPlan
from lowlat.engine.build import SetupError, build_rank
from lowlat.engine.config import EngineConfig
from lowlat.engine.device_results import PendingStep
from lowlat.engine.device_runner import DeviceRunner
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.parallel.group import SingleRank

_PAGE = 16
_CHUNK = 512
_WIDTH = 8
"""Most rows of a request in a step with a draft."""
_AHEAD = 2
"""Steps launched before the result of an earlier one is read, where the runner's state lives on the device."""


def _stored_bytes(spec: Any, checkpoint: Any) -> int | None:
    """Bytes of the GGUF blocks that a step reads, for kernels that multiply them as they are; None for all others."""
    formats = spec.requires.weight_formats or ()
    if not formats or not all(name.startswith("gguf.") for name in formats) or checkpoint.source.kind != "gguf":
        return None
    tensors = checkpoint.source.gguf().file.tensors
    # an embedding table is read whole only where it is the head too
    skipped = {"token_embd.weight"} if "output.weight" in tensors else set()
    return sum(int(info.size) for name, info in tensors.items() if name not in skipped)


class GeneralArm:
    """Decode steps of the model runner, greedy, with the context set again before every series of timed steps.

    With `kernels`, that kernel library must have taken the decode steps over. A runner whose state lives on the device
    is run ahead, as the engine does; another is waited for at every step.
    """

    def __init__(self, case: StepCase, kernels: str | None = None) -> None:
        pages_each = pages_for(case.context + case.steps + _AHEAD + 2 + (_WIDTH if case.spec != "off" else 0), _PAGE)
        config = EngineConfig(
            model=case.model or case.shape.name,
            dtype=case.dtype,
            device=case.device,
            max_batch=case.requests,
            max_context=min(case.shape.max_context, pages_each * _PAGE),
            kv_tokens=pages_each * _PAGE * case.requests,
            # Window pages must last from the last chunk of the context to the last step.
            chunk_tokens=_CHUNK + (pages_each + 1) * _PAGE - case.context,
            page_size=_PAGE,
            threads=torch.get_num_threads(),
            low_latency="off" if kernels is None else "require",
            kernels=kernels,
            spec=case.spec,
            draft=case.draft,
            spec_simulate_acceptance=1.0 if case.spec != "off" else None,
        )
        checkpoint: Any = (
            open_checkpoint(case.model) if case.model else RandomCheckpoint(case.dense, case.seed, case.device)
        )
        try:
            parts = build_rank(config, checkpoint, SingleRank(), lambda *_: None)
        except (ValueError, SetupError, UnsupportedModelError) as error:
            what = f"lowlat's runner cannot run {case.shape.name} on {case.device}"
            raise ArmUnavailableError(f"{what}: {error}") from error
        self.runner = parts.runner
        self.low = parts.kernels.low
        self._sampling = msgspec.structs.replace(GREEDY, width=parts.width, end=pages_each * _PAGE)
        self.note = "model runner with sampling, without scheduler"
        if isinstance(self.runner, DeviceRunner):
            self.note += f", run ahead by {_AHEAD}"
        if case.spec != "off":
            whose = "the model's draft" if case.spec == "draft" else case.spec
            self.note += f", {parts.width - 1} tokens of {whose} checked in each step, one counted as right"
        self.weight_bytes: int | None = None
        self._case = case
        self._step = 2
        self._windows = parts.windows
        self._pages_each = pages_each
        self._has_state = parts.snapshots is not None
        self._fill()
        if kernels is not None:
            self._check_taken_over(parts.kernels.low, kernels)
            self.note += f", kernels {parts.facts.kernels}"
            candidate = parts.kernels.low.candidate
            assert candidate is not None
            self.weight_bytes = _stored_bytes(candidate.spec, checkpoint)

    def _check_taken_over(self, low: Any, kernels: str) -> None:
        """Run one decode step; the library must have computed it, or its arm would be the general one's twin."""
        before = low.counters.snapshot()
        self.decode()
        counted = {key: count - before.get(key, 0) for key, count in low.counters.snapshot().items()}
        fallen = [reason for (path, reason), count in counted.items() if count and path != "plugin"]
        if fallen or not any(counted.values()):
            raise ArmUnavailableError(f"{kernels} did not compute the step: {', '.join(fallen) or 'it was not asked'}")

    def _run(self, plan: StepPlan) -> None:
        self.runner.run(plan)
        self._step += 1

    def _fill(self) -> None:
        """Compute the context of every request, in chunks as the scheduler would."""
        pages_each = self._pages_each
        for slot in range(self._case.requests):
            begins = [(slot, self._sampling)]
            owned = list(range(slot * pages_each, (slot + 1) * pages_each))
            pages = [(slot, 0, owned)]
            window = self._windows.begin([], 0) if self._windows is not None else None
            for start in range(0, self._case.context, _CHUNK):
                end = min(start + _CHUNK, self._case.context)
                tokens = [(start + i) % (self._case.shape.vocab - 3) + 3 for i in range(end - start)]
                chunk = PrefillChunk(slot, start, tokens, end == self._case.context)
                plan = StepPlan(self._step, begins, pages, [chunk], [])
                if self._windows is not None and window is not None:
                    reached = end if end < self._case.context else pages_each * _PAGE
                    self._windows.reserve(window, reached)
                    entries = self._windows.slide(window, owned, start, reached)
                    plan.windows = [(slot, *entries)] if entries is not None else []
                self._run(plan)
                begins, pages = [], []

    def rewind(self) -> None:
        """Set every request back to `context` tokens by computing its last prompt token again; models with state that
        only goes forward compute all of it again."""
        if self._has_state:
            self._fill()
            return
        last = self._case.context - 1
        chunks = [PrefillChunk(slot, last, [3], True) for slot in range(self._case.requests)]
        self._run(StepPlan(self._step, [], [], chunks, []))

    def decode(self) -> None:
        """One decode step of all requests."""
        self._run(StepPlan(self._step, [], [], [], list(range(self._case.requests))))

    def measure(self) -> list[float]:
        """Microseconds of each step, from the plan to the sampled tokens on the host; run ahead, from one step's tokens
        to the next's."""
        self.rewind()
        if isinstance(self.runner, DeviceRunner):
            return self._run_ahead(self.runner)
        return time_cpu(self.decode, self._case.steps)

    def _run_ahead(self, runner: DeviceRunner) -> list[float]:
        slots = list(range(self._case.requests))
        pending: deque[PendingStep] = deque()
        arrivals = []
        for _ in range(_AHEAD + self._case.steps + 1):
            pending.append(runner.launch(StepPlan(self._step, [], [], [], slots)))
            self._step += 1
            if len(pending) > _AHEAD:
                pending.popleft().wait()
                arrivals.append(time.perf_counter())
        for step in pending:
            step.wait()
        return [(after - before) * 1e6 for before, after in pairwise(arrivals)]

    def close(self) -> None:
        """Drop the model, its cache and its graphs, and a kernel library's packed weights."""
        del self.runner, self.low
        if self._case.device == "cuda":
            gc.collect()  # a runner and its graphs hold each other
            torch.cuda.empty_cache()
