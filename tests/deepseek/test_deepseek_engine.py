"""DeepSeek-V4.1 under the scheduler: chunked prefill, batches, pages that run out, preemption, slots used again."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepseek_engine import StateRunner
from deepseek_kit import Runner, load, some_tokens

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.scheduler import Scheduler
from lowlat.models.deepseek_v4.model import DeepseekV4

PAGES, PAGE = 10, 16


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


def test_the_schedulers_answers_equal_those_of_a_lone_request(model: DeepseekV4) -> None:
    limits = PlanLimits(max_batch=3, max_rows=24 + 3, max_pages=PAGES)
    runner = StateRunner(model, limits, pages=PAGES, page_size=PAGE)
    scheduler = Scheduler(PrefixCache(PAGES, PAGE, enabled=False), limits, eos_ids=frozenset(), chunk_tokens=24, seed=0)
    lengths = [61, 5, 40, 33, 70, 17]
    prompts = {f"r{index}": some_tokens(length, seed=50 + index) for index, length in enumerate(lengths)}
    count = 12
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for index, (name, prompt) in enumerate(prompts.items()):
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        late = index == 4  # arrives later, goes first
        if not late:
            scheduler.add(GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling))
    for step in range(400):
        if step == 6:
            sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            scheduler.add(GenerateRequest(id="r4", prompt_ids=prompts["r4"], sampling=sampling, priority=5))
        plan = scheduler.schedule()
        if plan is not None:
            result = runner.run(plan)
            scheduler.commit(result.step, result.tokens, result.logprobs)
        for output in scheduler.take_outputs():
            answers[output.id] += output.token_ids
        if not scheduler.has_work and step > 6:
            break
    assert scheduler.stats.preemptions > 0, "the test must preempt"
    widths = runner.served.widths
    assert any(len(step) == 3 for step in widths)
    assert any(max(step) == 24 for step in widths), "prefill must come in chunks"
    assert any(1 in step and max(step) > 1 for step in widths), "decode beside prefill"
    for name, prompt in prompts.items():
        assert answers[name] == alone(model, prompt, count), name
