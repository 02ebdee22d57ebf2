"""DeepSeek under the engine's own scheduler: an executor that gives every request a state row beside its pages."""

from __future__ import annotations

from collections import deque

import torch

from lowlat.engine.batch import PlanLimits, StepPlan
from lowlat.engine.executor import StepResult
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.model import DeepseekV4
from lowlat.models.deepseek_v4.step import RequestRows, make_step


class StateExecutor:
    """Runs each plan when it is launched; a request's batch slot is its state row. Greedy."""

    def __init__(self, model: DeepseekV4, limits: PlanLimits, *, pages: int, page_size: int) -> None:
        self.model = model
        self.caches = DeepseekCaches(
            model.config, model.numerics, pages=pages, page_size=page_size, states=limits.max_batch
        )
        self.widths: list[list[int]] = []
        self._page_size = page_size
        self._slots = torch.zeros(limits.max_batch, limits.max_pages * page_size, dtype=torch.int64)
        self._lengths = [0] * limits.max_batch
        self._tokens = [0] * limits.max_batch
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Compute a step."""
        size = self._page_size
        for slot, first, pages in plan.pages:
            slots = torch.tensor(pages).unsqueeze(1) * size + torch.arange(size)
            self._slots[slot, first * size : (first + len(pages)) * size] = slots.flatten()
        requests, sampling = [], []
        for chunk in plan.chunks:
            requests.append(RequestRows(chunk.tokens, chunk.start, chunk.slot, self._slots[chunk.slot].clone()))
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
            sampling.append(chunk.sample)
        for slot in plan.decodes:
            requests.append(RequestRows([self._tokens[slot]], self._lengths[slot], slot, self._slots[slot].clone()))
            self._lengths[slot] += 1
            sampling.append(True)
        self.widths.append([len(request.tokens) for request in requests])
        logits = self.model.compute(make_step(requests), self.caches)
        tokens = []
        for request, sample, row in zip(requests, sampling, logits, strict=True):
            if sample:
                self._tokens[request.state] = int(row.float().argmax())
                tokens.append(self._tokens[request.state])
        self._results.append(StepResult(plan.step, tokens))

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest result."""
        return self._results.popleft() if self._results else None

    def close(self) -> None:
        """Nothing to end."""
