"""The engine with the dense step on a Hopper GPU: tokens, counters, graphs, and a step that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowlat.bench.presets import DenseShape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.engine.build import build_rank, make_executor, make_scheduler
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.parallel.group import SingleRank

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SHAPE = DenseShape(
    name="small", layers=3, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=4001,
    qk_norm=True, tied=True, architecture="Qwen3ForCausalLM", max_context=2048, eps=1e-6,
)  # fmt: skip


def engine(low_latency: str, **settings: Any) -> EngineCore:
    config = EngineConfig(
        model="small", device="cuda", dtype="bfloat16", max_batch=10, max_context=2048, kv_tokens=8192, page_size=16,
        run_ahead=2, low_latency=low_latency, kernels="dense-hopper" if low_latency == "require" else None, seed=0,
        **settings,
    )  # fmt: skip
    checkpoint: Any = RandomCheckpoint(SHAPE, 0)
    parts = build_rank(config, checkpoint, SingleRank(), lambda *_: None)
    return EngineCore(make_scheduler(config, parts), make_executor(parts), run_ahead=2, low_latency=parts.kernels.low)


def answers(core: EngineCore, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in requests]
    for index, (prompt, sampling) in enumerate(requests):
        core.submit(GenerateRequest(id=str(index), prompt_ids=prompt, sampling=sampling))
    while core.has_work:
        for output in core.turn():
            assert output.error is None, output.error
            found[int(output.id)] += output.token_ids
    return found


def prompt(request: int, length: int) -> list[int]:
    return [(request * 7919 + place * 31) % 3998 + 3 for place in range(length)]


@pytest.fixture(scope="module")
def cores() -> Iterator[tuple[EngineCore, EngineCore]]:
    made = engine("off"), engine("require")
    yield made
    for core in made:
        core.close()


def steps(core: EngineCore) -> dict[tuple[str, str], int]:
    return {(path, reason): count for path, reason, count in core.stats().low_latency_steps}


def test_tokens_of_the_general_path_up_to_rounding(cores: tuple[EngineCore, EngineCore]) -> None:
    """Random weights leave the best logits near each other, so answers may part; most first tokens must agree."""
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    requests = [(prompt(request, 40 + 97 * request), sampling) for request in range(8)]
    general, kernels = (answers(core, requests) for core in cores)
    same = sum(a[:4] == b[:4] for a, b in zip(general, kernels, strict=True))
    print("answers that begin alike:", same, steps(cores[1]))
    assert same >= 6
    assert steps(cores[1])["plugin", "covered"] >= 20


def test_every_batch_size_and_mode_replays_the_eager_steps(cores: tuple[EngineCore, EngineCore]) -> None:
    """Drawn tokens are those of the same logits: seeded answers alone equal seeded answers beside others."""
    core = cores[1]
    sampling = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.8, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, seed=12, top_k=50, top_p=0.9, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0, frequency_penalty=0.5, logprobs=2, ignore_eos=True),
    ]
    requests = [(prompt(request, 33 + 50 * request), sampling[request % 4]) for request in range(8)]
    before = steps(core).get(("plugin", "covered"), 0)
    together = answers(core, requests)
    assert steps(core)["plugin", "covered"] - before >= 8
    for request, expected in zip(requests[1:4], together[1:4], strict=True):
        # Prompts are computed on the general path, whose bits depend on what shares the batch: compare beginnings.
        assert answers(core, [request])[0][:2] == expected[:2]


def test_nine_requests_are_too_wide(cores: tuple[EngineCore, EngineCore]) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    before = steps(cores[1]).get(("general", "too-wide"), 0)
    assert all(len(one) == 6 for one in answers(cores[1], [(prompt(n, 20), sampling) for n in range(9)]))
    assert steps(cores[1])["general", "too-wide"] > before


def test_a_failed_step_runs_again_on_the_general_path() -> None:
    """The error word is set while steps are in flight, as a block would that missed its deadline."""
    core = engine("require")
    assert core.low_latency is not None
    kernel: Any = core.low_latency.kernel
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    expected = answers(core, [(prompt(n, 60), sampling) for n in range(3)])
    for index in range(3):
        core.submit(GenerateRequest(id=str(index), prompt_ids=prompt(index, 60), sampling=sampling))
    found: list[list[int]] = [[] for _ in range(3)]
    turns = 0
    while core.has_work:
        for output in core.turn():
            assert output.error is None, output.error
            found[int(output.id)] += output.token_ids
        turns += 1
        if turns == 12:
            kernel._step.state[1] = 1 + 5 * 16 + 2
    assert [len(one) for one in found] == [40] * 3
    # Answers may part where roundings decide, and the failed step lies where the best logits may be near each other.
    assert [one[:4] for one in found] == [one[:4] for one in expected]
    counts = steps(core)
    print(counts, core.low_latency.report().reasons)
    assert counts["general", "failed"] >= 20
    assert any(
        "block 5 gave up waiting for the input of stage 'attention'" in str(r)
        for r in core.low_latency.report().reasons
    )
    core.close()
    kernel._step.reset()


def test_guesses_are_checked_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that repeats itself: its steps have several rows, and its tokens are those without guesses."""
    core = engine("require", spec="ngram", spec_width=4, prefix_cache=False)
    runner: Any = core.executor._runner  # type: ignore[attr-defined]
    requests = [(prompt(3, 23) * 6, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True))]
    with monkeypatch.context() as none:
        none.setattr(runner.verifier.speculation, "plan", lambda of, size: 1)
        expected = answers(core, requests)[0]
    assert core.scheduler.stats.guessed_tokens == 0
    found = answers(core, requests)[0]
    print(steps(core), "guessed", core.scheduler.stats.guessed_tokens, "of", core.scheduler.stats.accepted_tokens)
    assert core.scheduler.stats.guessed_tokens > 0
    assert steps(core)["plugin", "covered"] > 50
    assert found == expected, "a row has the same bits at every width"
    core.close()
