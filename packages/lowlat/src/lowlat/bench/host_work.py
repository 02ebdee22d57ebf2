"""The host's work of serving, alone: scheduler, cache, plan and messages around an executor that takes no time.

`python -m lowlat.bench.host_work --scenario decode --requests 4 --steps 200` runs it once, for a counter of
instructions or a clock around it. Nothing in it depends on time, addresses or random numbers.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits, StepPlan, encode_plan
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import ScriptedExecutor
from lowlat.engine.messages import Outputs, encode
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.scheduler import Scheduler

SCENARIOS = ("decode", "churn")
PAGE_SIZE = 16


class PlanWriter(ScriptedExecutor):
    """A scripted executor that also writes every plan into a record, as one that feeds ranks does."""

    def __init__(self, limits: PlanLimits) -> None:
        super().__init__(lambda slot, position: (slot * 31 + position) % 997 + 3)
        self._record = np.zeros(limits.words, dtype=np.int32)
        self._decodes: list[int] | None = None

    def launch(self, plan: StepPlan) -> None:
        """Write the plan, then run it."""
        encode_plan(plan, self._record, self._decodes)
        self._decodes = plan.decodes
        super().launch(plan)


def _request(number: int, prompt_tokens: int, max_tokens: int) -> GenerateRequest:
    # half of each prompt is shared, so that churn matches prefixes
    shared = prompt_tokens // 2
    prompt = [5 + i % 211 for i in range(shared)] + [7 + (number * 13 + i) % 223 for i in range(prompt_tokens - shared)]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(id=f"r{number}", prompt_ids=prompt, sampling=sampling)


class HostWork:
    """One engine core with `requests` running requests; `step` is what the host does for one step.

    `decode`: all requests decode, none begins or ends. `churn`: each request ends after eight tokens and another with a
    prompt of 128 tokens takes its place.
    """

    def __init__(self, scenario: str, requests: int, steps: int) -> None:
        if scenario not in SCENARIOS:
            raise ValueError(f"scenario {scenario!r} is none of {', '.join(SCENARIOS)}")
        self.churn = scenario == "churn"
        self._answer = 8 if self.churn else steps + 64
        tokens = 256 + self._answer
        pages = requests * (tokens // PAGE_SIZE + 2) * 2
        limits = PlanLimits(max_batch=requests, max_rows=512 + requests, max_pages=tokens // PAGE_SIZE + 2)
        scheduler = Scheduler(
            PrefixCache(pages, PAGE_SIZE), limits, eos_ids=frozenset({2}), chunk_tokens=512, seed=0
        )  # fmt: skip
        self.core = EngineCore(scheduler, PlanWriter(limits), run_ahead=1)
        self._next = 0
        for _ in range(requests):
            self._submit()
        for _ in range(8):
            self.step()

    def _submit(self) -> None:
        self.core.submit(_request(self._next, 128, self._answer))
        self._next += 1

    def step(self) -> int:
        """One turn of the engine and the message to the front; returns the tokens it brought."""
        outputs = self.core.turn()
        encode(Outputs(outputs))
        if self.churn:
            for output in outputs:
                if output.finish_reason is not None:
                    self._submit()
        return sum(len(output.token_ids) for output in outputs)


def seconds_per_step(scenario: str, requests: int, steps: int) -> float:
    """Wall-clock seconds of host work a step, with the garbage collector off."""
    work = HostWork(scenario, requests, steps)
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(steps):
            work.step()
        return (time.perf_counter() - start) / steps
    finally:
        gc.enable()


def main() -> None:
    """Run one scenario for a number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="decode")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    # the same set-up whatever the number of steps: its cost must cancel between two runs
    work = HostWork(arguments.scenario, arguments.requests, 2000)
    gc.collect()
    gc.disable()
    tokens = sum(work.step() for _ in range(arguments.steps))
    print(tokens)


if __name__ == "__main__":
    main()
