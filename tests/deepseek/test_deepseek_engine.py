"""DeepSeek-V4.1 under the scheduler: chunked prefill, batches, pages that run out, preemption, slots used again."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepseek_engine import StateExecutor
from deepseek_kit import Runner, load, some_tokens

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.scheduler import Scheduler
from lowlat.models.deepseek_v4.model import DeepseekV4

PAGES, PAGE = 10, 16
COUNT = 10


@pytest.fixture(scope="module")
def model(tiny_v41: Path) -> DeepseekV4:
    return load(tiny_v41)


def alone(model: DeepseekV4, prompt: list[int], count: int) -> list[int]:
    runner = Runner(model)
    tokens = list(prompt)
    logits = runner.prefill(0, tokens)
    for _ in range(count):
        tokens.append(int(logits[-1].float().argmax()))
        if len(tokens) < len(prompt) + count:
            logits = runner.run(runner.rows(0, tokens[-1:], len(tokens) - 1))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    return {f"r{i}": some_tokens(length, seed=50 + i) for i, length in enumerate((61, 5, 40, 33, 70))}


@pytest.fixture(scope="module")
def expected(model: DeepseekV4, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: alone(model, prompt, COUNT) for name, prompt in prompts.items()}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_schedulers_answers_equal_those_of_a_lone_request(
    model: DeepseekV4, prompts: dict[str, list[int]], expected: dict[str, list[int]], run_ahead: int
) -> None:
    limits = PlanLimits(max_batch=3, max_rows=24 + 3, max_pages=PAGES)
    executor = StateExecutor(model, limits, pages=PAGES, page_size=PAGE)
    cache = PrefixCache(PAGES, PAGE, enabled=False)
    scheduler = Scheduler(cache, limits, eos_ids=frozenset(), chunk_tokens=24, seed=0)
    core = EngineCore(scheduler, executor, run_ahead=run_ahead)
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for turn in range(300):
        for name, prompt in prompts.items():
            late = name == "r4"  # arrives later, goes first
            if turn == (6 if late else 0):
                sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
                core.submit(GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling, priority=5 * late))
        for output in core.turn():
            answers[output.id] += output.token_ids
        scheduler.check()
        if not core.has_work and turn > 6:
            break
    assert scheduler.stats.preemptions > 0, "the test must preempt"
    assert any(len(step) == 3 for step in executor.widths)
    assert any(max(step) == 24 for step in executor.widths), "prefill must come in chunks"
    assert any(1 in step and max(step) > 1 for step in executor.widths), "decode beside prefill"
    assert answers == expected
