"""The runner of GPUs on several ranks, over gloo on a CPU: tokens as on one rank, one named error for a failed one."""

from __future__ import annotations

import sys
from pathlib import Path

import device_rank
import pytest
import torch
import transformers

from lowlat.engine import build, ranks
from lowlat.engine.config import EngineConfig
from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.executor import ExecutorError
from lowlat.engine.request import SamplingParams
from lowlat.engine.setup_error import SetupError
from lowlat.offline import Engine
from tiny_tokenizer import byte_tokenizer

SETTINGS = {"threads": 1, "kv_tokens": 512, "chunk_tokens": 8, "run_ahead": 2, "max_batch": 3, "low_latency": "off"}
KINDS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.9, seed=2**64 - 5),
    SamplingParams(max_tokens=20, temperature=0.8, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(
        max_tokens=12, temperature=0.7, seed=4, repetition_penalty=1.2, logit_bias=((7, 2.0),), min_tokens=4
    ),
    SamplingParams(max_tokens=10, temperature=0, logprobs=3),
    SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1),  # steps that the host must run
    SamplingParams(max_tokens=30, temperature=0),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with QK-norm, three key-value heads, and sizes that ranks do not share evenly."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=48,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(101))
    return path


@pytest.fixture(autouse=True)
def _states_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "select", device_rank.select)
    monkeypatch.setattr(ranks, "RANK_PROGRAM", (sys.executable, device_rank.__file__))


def answers(path: Path, size: int) -> tuple[list[list[int]], list[list[float]]]:
    with Engine(model=str(path), tensor_parallel=size, **SETTINGS) as engine:
        prompts = [[(7 * n + k) % 101 for k in range(5 + 3 * n)] for n in range(len(KINDS))]
        # At once, so that modes meet in steps, then one by one, over prefixes that are cached.
        got = engine.generate(prompts, KINDS) + [engine.generate(*pair) for pair in zip(prompts, KINDS, strict=True)]
        executor = engine._core.executor
        runner = (executor._rank0 if size > 1 else executor)._runner  # type: ignore[attr-defined]
        assert isinstance(runner, DeviceRunner)
        assert set(runner.fallbacks) == {"prompt log-probabilities"}
        chances = [[entry.logprob for entry in generation.logprobs or []] for generation in got]
        return [generation.token_ids for generation in got], chances


def test_ranks_go_on_with_the_same_tokens_as_one(tiny: Path):
    expected, chances = answers(tiny, 1)
    assert expected[: len(KINDS)] == expected[len(KINDS) :]
    for size in (2, 3):
        tokens, theirs = answers(tiny, size)
        assert tokens == expected
        assert [len(row) for row in theirs] == [len(row) for row in chances]
        for mine, other in zip(chances, theirs, strict=True):
            assert mine == pytest.approx(other, abs=1e-4)


def test_ranks_read_the_same_labels(tiny: Path):
    """Of `/v1/score`: rank 0 knows the labels, and all bring their columns of the logits."""
    found = []
    for size in (1, 2):
        with Engine(model=str(tiny), tensor_parallel=size, **SETTINGS) as engine:
            for mode in ("sis", "mis"):
                found.append(engine.score([5, 6, 7], [[1, 2], [3], [4, 9, 8]], [10, 20], mode=mode))
            executor = engine._core.executor
            runner = (executor._rank0 if size > 1 else executor)._runner  # type: ignore[attr-defined]
            assert not runner.fallbacks
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)


def test_ranks_are_told_what_auto_means(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """Else they would meet over gloo and compute on GPUs."""
    told = []

    class GpuPlatform(device_rank.KeepingPlatform):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.device = torch.device("cuda", rank)

    def start(config: EngineConfig) -> None:
        told.append(config.device)
        raise SetupError("enough")

    monkeypatch.setattr(build, "select", lambda device, rank: GpuPlatform(rank))
    monkeypatch.setattr(ranks.RankGroup, "start", start)
    with pytest.raises(SetupError, match="enough"):
        Engine(model=str(tiny), tensor_parallel=2, device="auto")
    assert told == ["cuda"]


def test_a_rank_that_fails_ends_all_with_its_own_words(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWLAT_TEST_BREAK", "9")
    engine = Engine(model=str(tiny), tensor_parallel=2, **SETTINGS)
    try:
        assert isinstance(engine._core.executor._rank0, DeviceExecutor)  # type: ignore[attr-defined]
        with pytest.raises(ExecutorError, match=r"^rank 1: .*RankLostError: a planted failure$"):
            engine.generate([1, 2, 3], SamplingParams(max_tokens=100, temperature=0))
    finally:
        engine.close()


def test_a_group_that_gave_up_answers_with_an_error(tiny: Path):
    """Not with what steps computed from parts that never came."""
    engine = Engine(model=str(tiny), tensor_parallel=2, **SETTINGS)
    try:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=100, temperature=0))
        next(stream)
        engine._core.executor._group._communicator.stop()  # type: ignore[attr-defined]
        with pytest.raises(ExecutorError, match="RankLostError: a rank was lost"):
            for _ in stream:
                pass
    finally:
        engine.close()


def test_a_rank_that_fails_while_it_starts_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOWLAT_TEST_BREAK", "1")  # the first step, before the engine is ready
    with pytest.raises(SetupError, match=r"^rank 1: RankLostError: a planted failure$"):
        Engine(model=str(tiny), tensor_parallel=2, **SETTINGS)
