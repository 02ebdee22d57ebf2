"""Whole models on the Triton kernels under Triton's interpreter: the runner of GPUs beside plain PyTorch operations.

test_kernels_interpreted.py runs this in a process of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models"))

from device_kit import EngineSize, make_runner
from family_kit import build, random_tokens, save_random

from lowlat.engine.batch import PrefillChunk, SlotSampling, StepPlan
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.triton_ops import TritonOps

FAMILIES = {
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {
        "head_dim": 16,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    },
}
SETTING = SlotSampling(0.0, 0, 1.0, 0, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_plain_operations(family, tmp_path):
    save_random(tmp_path, family, num_hidden_layers=2, hidden_size=24, intermediate_size=40, **FAMILIES[family])
    model = build(tmp_path)
    results = []
    for ops in (TritonOps(processors=3), ReferenceOps()):
        _, runner = make_runner(model, EngineSize(pages=40, page_size=3, max_batch=3), ops)
        size = {"begins": [(0, SETTING)], "pages": [(0, 0, [9, 3, 4, 8, 5])], "windows": [(0, 0, [1, 0, 3, 2, 4])]}
        first = PrefillChunk(0, 0, random_tokens(7, 1), True)
        plans = [
            StepPlan(0, size["begins"], size["pages"], [first], [], windows=size["windows"]),
            StepPlan(
                1,
                [(2, SETTING)],
                [(2, 0, [11, 12, 20])],
                [PrefillChunk(2, 0, random_tokens(4, 2), True)],
                [0],
                windows=[(2, 0, [6, 5, 7])],
            ),
            StepPlan(2, [], [], [], [2, 0]),
            StepPlan(3, [], [], [], [0]),
        ]
        results.append([runner.run(plan) for plan in plans])
    for mine, theirs in zip(*results, strict=True):
        assert mine.tokens == theirs.tokens
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)
