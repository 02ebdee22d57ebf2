"""Greedy float32 answers of the embedded model equal those of transformers, whatever the engine does meanwhile.

The oracles were computed by transformers on the same weights. Answers must agree up to the first token whose margin
(distance between the two best logits) is under 0.01: beyond it, rounding may decide. `make soak` compares the long
answers whole, `make test` their first tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lowlat.cache.layout import KVPool
from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import ThreadExecutor
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.runner import ModelRunner
from lowlat.engine.scheduler import Scheduler
from lowlat.models.base import BuildContext, Model
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.registry import build_model
from lowlat.offline import Engine
from lowlat.parallel.group import SingleRank
from lowlat.platform import select

DATA = Path(__file__).parent.parent / "data"
SHORT = json.loads((DATA / "smollm2_135m_instruct_fp32_greedy.json").read_text())["cases"]
LONG = json.loads((DATA / "smollm2_135m_instruct_fp32_greedy_long.json").read_text())["cases"]
SURE_MARGIN = 0.01
FEW = 12
"""Answer tokens of the long prompts that `make test` compares."""


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    build = BuildContext(select("cpu"), SingleRank(), torch.float32, 8192)
    return build_model(open_checkpoint("smollm2"), build, lambda done, total: None)


class Run:
    """An engine around the shared model, and what happened in it."""

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 16,
        kv_tokens: int = 12_000,
        chunk_tokens: int = 512,
        max_batch: int = 8,
        run_ahead: int = 1,
    ) -> None:
        pages = kv_tokens // page_size
        limits = PlanLimits(max_batch=max_batch, max_rows=chunk_tokens + max_batch, max_pages=pages)
        kv = KVPool(model.kv_layout(pages, page_size), torch.device("cpu"))
        self.scheduler = Scheduler(
            PrefixCache(pages, page_size), limits, eos_ids=frozenset([2]), chunk_tokens=chunk_tokens, seed=0
        )
        runner = ModelRunner(model, kv, limits, SingleRank(), min_rows=4)
        executor = ThreadExecutor(self._counting(runner), lambda: torch.set_num_threads(1))
        self.core = EngineCore(self.scheduler, executor, run_ahead=run_ahead)
        self.chunks = 0
        self.most_rows = 0
        self.cached: dict[str, int] = {}

    def _counting(self, runner: ModelRunner) -> Any:
        def run(plan: Any) -> Any:
            self.chunks += len(plan.chunks)
            self.most_rows = max(self.most_rows, len(plan.decodes))
            return runner.run(plan)

        return run

    def answer(self, cases: list[dict[str, Any]], tokens: int | None = None) -> list[list[int]]:
        """Answers of all cases at once, each up to `tokens` tokens."""
        for number, case in enumerate(cases):
            sampling = SamplingParams(max_tokens=min(len(case["output_ids"]), tokens or 10_000), temperature=0)
            self.core.submit(GenerateRequest(id=str(number), prompt_ids=case["input_ids"], sampling=sampling))
        answers: list[list[int]] = [[] for _ in cases]
        while self.core.has_work:
            for output in self.core.turn():
                assert output.error is None
                answers[int(output.id)].extend(output.token_ids)
                self.cached[output.id] = output.cached_tokens
        self.scheduler.check()
        assert self.scheduler.cache.pool.held == 0
        return answers

    def close(self) -> None:
        self.core.close()


def compare(case: dict[str, Any], answer: list[int], tokens: int | None = None) -> None:
    """Equal up to the first unsure margin (and at least one token is sure)."""
    expected = case["output_ids"][:tokens]
    sure = next((n for n, margin in enumerate(case["margins"]) if margin < SURE_MARGIN), len(expected))
    assert sure > 0
    assert answer[:sure] == expected[:sure]


def check(run: Run, cases: list[dict[str, Any]], tokens: int | None = None) -> None:
    for case, answer in zip(cases, run.answer(cases, tokens), strict=True):
        compare(case, answer, tokens)
    run.close()


def eight_different() -> list[dict[str, Any]]:
    """Five oracle prompts, and three that continue one inside its answer."""
    continued = []
    for cut in (3, 7, 11):
        case = dict(SHORT[1])
        case["input_ids"] = case["input_ids"] + case["output_ids"][:cut]
        case["output_ids"] = case["output_ids"][cut:]
        case["margins"] = case["margins"][cut:]
        continued.append(case)
    return [*SHORT, *continued]


@pytest.mark.parametrize("case", SHORT, ids=lambda case: f"{len(case['input_ids'])} tokens")
def test_alone(model: Model, case: dict[str, Any]):
    check(Run(model), [case])


def test_a_batch_of_eight_different_prompts(model: Model):
    run = Run(model)
    check(run, eight_different())
    assert run.most_rows == 8


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes_with_a_warm_cache(model: Model, page_size: int):
    run = Run(model, page_size=page_size, kv_tokens=4096)
    prompt = {**LONG[0], "input_ids": LONG[0]["input_ids"][:100], "output_ids": [0] * 4, "margins": [1] * 4}
    cold = run.answer([prompt])[0]
    assert run.cached["0"] == 0
    warm = run.answer([prompt])[0]
    assert run.cached["0"] == 99 // page_size * page_size > 0
    assert warm == cold
    check(run, SHORT)


@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_chunked_prefill(model: Model, chunk_tokens: int):
    run = Run(model, chunk_tokens=chunk_tokens)
    case = SHORT[4] if chunk_tokens == 7 else LONG[0]
    check(run, [case], FEW)
    assert run.chunks == -(-len(case["input_ids"]) // chunk_tokens) > 1


def test_after_preemption(model: Model):
    run = Run(model, page_size=1, kv_tokens=100, max_batch=4)
    check(run, eight_different())
    assert run.scheduler.stats.preemptions > 0


def test_long_prompts_and_their_warm_repeat(model: Model):
    run = Run(model)
    for case, answer in zip(LONG, run.answer(LONG, FEW), strict=True):
        compare(case, answer, FEW)
    for case, answer in zip(LONG, run.answer(LONG, FEW), strict=True):
        compare(case, answer, FEW)
    assert [run.cached[str(n)] for n in range(2)] == [(len(case["input_ids"]) - 1) // 16 * 16 for case in LONG]
    run.close()


def test_logprobs_equal_the_oracle(model: Model):
    run = Run(model)
    case = SHORT[0]
    sampling = SamplingParams(max_tokens=len(case["output_ids"]), temperature=0, logprobs=2)
    run.core.submit(GenerateRequest(id="a", prompt_ids=case["input_ids"], sampling=sampling))
    entries = []
    while run.core.has_work:
        for output in run.core.turn():
            entries.extend(output.logprobs or [])
    assert [entry.logprob for entry in entries] == pytest.approx(case["logprobs"], abs=2e-3)
    margins = [entry.top_logprobs[0] - entry.top_logprobs[1] for entry in entries]
    assert margins == pytest.approx(case["margins"], abs=2e-3)
    run.close()


def test_bfloat16_stays_near_float32():
    """bfloat16 leaves the greedy path early, so its log-probabilities are compared along the oracle's own tokens."""
    with Engine(model="smollm2", dtype="bfloat16", low_latency="off", threads=1, kv_tokens=1024) as engine:
        for case in SHORT[:2]:
            for cut in (0, 5, 11):
                ids = case["input_ids"] + case["output_ids"][:cut]
                entry = engine.generate(ids, SamplingParams(max_tokens=1, temperature=0, logprobs=20)).logprobs[0]
                seen = {top.token_id: top.logprob for top in entry.top}
                assert seen[case["output_ids"][cut]] == pytest.approx(case["logprobs"][cut], abs=0.25)


def test_two_ranks_with_whole_key_value_groups():
    """Nine query heads on three key-value heads: six and three heads on the two ranks."""
    with Engine(
        model="smollm2", tensor_parallel=2, low_latency="off", threads=1, kv_tokens=2048, chunk_tokens=16
    ) as engine:
        prompts = [case["input_ids"] for case in SHORT]
        sampling = [SamplingParams(max_tokens=len(case["output_ids"]), temperature=0) for case in SHORT]
        for case, generation in zip(SHORT, engine.generate(prompts, sampling), strict=True):
            compare(case, generation.token_ids)
        # A second run takes its prompts from the cache and is stopped by text on the front's side.
        again = engine.generate(prompts[4], msgspec.structs.replace(sampling[4], max_tokens=3))
        assert again.usage.cached_tokens == 32
        compare(SHORT[4], again.token_ids, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=lambda case: f"{len(case['input_ids'])} tokens")
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"page_size": 1},
        {"page_size": 64},
        {"chunk_tokens": 7},
        {"chunk_tokens": 64},
        {"run_ahead": 0},
        {"run_ahead": 2},
    ],
    ids=str,
)
def test_long_answers_whole(model: Model, shape: dict[str, int], case: dict[str, Any]):
    run = Run(model, **shape)
    compare(case, run.answer([case])[0])
    compare(case, run.answer([case])[0])
    assert run.cached["0"] > 0
    run.close()


@pytest.mark.slow
def test_all_at_once_with_long_prompts_and_preemption(model: Model):
    run = Run(model, kv_tokens=4096, max_batch=8)
    cases = [*LONG, *eight_different()[:6]]
    check(run, [*cases, *LONG])
    assert run.scheduler.stats.preemptions > 0
    assert run.most_rows >= 8


@pytest.mark.slow
def test_long_answers_on_two_ranks():
    with Engine(model="smollm2", tensor_parallel=2, low_latency="off", threads=1, kv_tokens=6000) as engine:
        prompts = [case["input_ids"] for case in LONG]
        sampling = SamplingParams(max_tokens=200, temperature=0)
        for case, generation in zip(LONG, engine.generate(prompts, [sampling] * 2), strict=True):
            compare(case, generation.token_ids)
