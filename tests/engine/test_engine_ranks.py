"""Tensor parallelism over gloo: same answers on one, two and four ranks; a lost rank is an error, not a hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import transformers

from lowlat.engine.executor import ExecutorError
from lowlat.engine.request import SamplingParams
from lowlat.models.config import UnsupportedModelError
from lowlat.offline import Engine
from lowlat.parallel.shard import Shard
from tiny_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with four key-value heads and sizes that four ranks do not share evenly."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=101,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(101))
    return path


def answers(path: Path, ranks: int) -> list[list[int]]:
    with Engine(model=str(path), tensor_parallel=ranks, threads=1, kv_tokens=512, chunk_tokens=8) as engine:
        prompts = [[(7 * n + k) % 101 for k in range(5 + 6 * n)] for n in range(4)]
        greedy, drawn = SamplingParams(max_tokens=24, temperature=0), SamplingParams(max_tokens=24, seed=5, logprobs=1)
        generations = engine.generate(prompts, [greedy, drawn, greedy, drawn])
        assert engine._core.stats().prompt_tokens == sum(map(len, prompts))
        return [generation.token_ids for generation in generations]


def test_two_and_four_ranks_answer_like_one(tiny: Path):
    expected = answers(tiny, 1)
    assert all(len(answer) == 24 for answer in expected)
    assert answers(tiny, 2) == expected
    assert answers(tiny, 4) == expected


def test_more_ranks_than_key_value_heads_are_refused(tiny: Path):
    with pytest.raises((UnsupportedModelError, ExecutorError, RuntimeError), match="use --tp 4 or less"):
        Engine(model=str(tiny), tensor_parallel=5, threads=1, kv_tokens=512)


def test_a_lost_rank_is_an_error(tiny: Path):
    engine = Engine(model=str(tiny), tensor_parallel=2, threads=1, kv_tokens=512)
    try:
        stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=100, temperature=0))
        next(stream)
        rank = engine._core.executor._group._processes[0]  # type: ignore[attr-defined]
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
        with pytest.raises(ExecutorError):
            for _ in stream:
                pass
    finally:
        engine.close()


def test_parts_cover_everything_once():
    for size in range(1, 9):
        for total, unit in ((9, 1), (96, 8), (49152, 1), (17, 1)):
            if total // unit < size:
                continue
            parts = [Shard(rank, size).part(total, unit) for rank in range(size)]
            assert [index for part in parts for index in range(part.start, part.stop)] == list(range(total))
            assert all(part.start % unit == 0 for part in parts)
    with pytest.raises(ValueError, match="3 units cannot be spread over 4 ranks"):
        Shard(0, 4).part(3)
