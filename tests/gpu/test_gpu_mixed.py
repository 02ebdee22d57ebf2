"""Requests of every kind beside each other on a GPU: each has the tokens that it has alone, and the logits but for
rounding. What differs is told by request and place, with the steps that chose there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowlat.engine import device_build
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.request import SamplingParams
from lowlat.layers.device_reference import ReferenceOps
from lowlat.offline import Engine
from tiny_tokenizer import byte_tokenizer

pytestmark = pytest.mark.gpu

KINDS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.9, seed=2**64 - 5),
    SamplingParams(max_tokens=20, temperature=0.8, seed=3, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=12, temperature=0.7, seed=4, repetition_penalty=1.2, logit_bias=((7, 2.0),)),
    SamplingParams(max_tokens=10, temperature=0, logprobs=3),
    SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1),
]
PROMPTS = [[(7 * n + k) % 101 for k in range(5 + 30 * n)] for n in range(len(KINDS))]
SETTINGS = {
    "device": "cuda", "max_context": 256, "kv_tokens": 2048, "run_ahead": 2, "low_latency": "off", "dtype": "float32",
}  # fmt: skip
ROUNDING = 1e-4
"""Logits are of the order of ten; float32 products of other shapes round elsewhere."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with QK-norm and four key-value heads."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=101,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(101))
    return path


@pytest.fixture(scope="module")
def answered(tiny: Path) -> Callable[..., Any]:
    """A function that makes an engine and returns its answers with their logits."""
    from logit_log import Answered, LogitLog

    def run(max_batch: int, *, plain: bool = False, **settings: Any) -> Answered:
        logs = []

        def logged(*parts: Any) -> DeviceRunner:
            runner = DeviceRunner(*parts)
            logs.append(LogitLog(runner, len(PROMPTS), 257))
            return runner

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_build, "DeviceRunner", logged)
            if plain:
                patch.setattr(device_build, "device_ops", lambda device: (ReferenceOps(), False))
            with Engine(model=str(tiny), max_batch=max_batch, **{**SETTINGS, **settings}) as engine:
                logs[0].start()
                tokens = [got.token_ids for got in engine.generate(PROMPTS, KINDS)]
                return Answered(PROMPTS, tokens, logs[0])

    return run


@pytest.fixture(scope="module")
def alone(answered: Callable[..., Any]) -> Any:
    """Plain PyTorch operations, one request after another."""
    return answered(1, plain=True)


CASES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch": 1},
    "two, plain operations": {"max_batch": 2, "plain": True},
    "two": {"max_batch": 2},
    "two, none ahead": {"max_batch": 2, "run_ahead": 0},
    "two, short chunks": {"max_batch": 2, "chunk_tokens": 64},
    "four": {"max_batch": 4},
    "six": {"max_batch": 6},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_beside_others_are_those_alone(case, answered, alone):
    got = answered(**CASES[case])
    lines = got.differences(alone)
    print(f"\n{case}:", *lines, sep="\n  ")
    assert got.tokens == alone.tokens, "\n".join(lines)
    assert got.farthest(alone) < ROUNDING, "\n".join(lines)
