"""Requests of every kind beside each other on a GPU: each has the tokens that it has alone, and the logits but for
rounding. What differs is told by request and place, with the steps that chose there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_kit import KINDS, PROMPTS

from lowlat.engine import device_build
from lowlat.engine.device_runner import DeviceRunner
from lowlat.layers.device_reference import ReferenceOps
from lowlat.offline import Engine

pytestmark = pytest.mark.gpu

SETTINGS = {
    "device": "cuda", "max_context": 256, "kv_tokens": 2048, "run_ahead": 2, "low_latency": "off", "dtype": "float32",
}  # fmt: skip
ROUNDING = 1e-4
"""Logits are of the order of ten; float32 products of other shapes round elsewhere."""


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
