"""Families in the engine: windows with a warm prefix cache, chunked prompts and preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_kit import build, check_greedy, make_engine, random_tokens, save_random

from lowlat.engine.request import GenerateRequest, SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6},
    "GptOss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
ANSWER = 20


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_prefixes_chunks_and_preemption(family: str, tmp_path: Path):
    reference, model = save_random(tmp_path, family, **FAMILIES[family]), build(tmp_path)
    # Window pages are too few for four requests, so they change hands all the time.
    core = make_engine(model, pages=60, page_size=2, chunk_tokens=16, max_batch=4, window_requests=3.5)
    scheduler = core.scheduler
    shared = random_tokens(31, 20)
    # Together they need more than the pool's 120 tokens, and the last two reuse what others computed.
    prompts = [*(random_tokens(28 + n, 21 + n) for n in range(3)), shared, shared + [5, 6, 7], shared[:25]]
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    cached: dict[str, int] = {}

    def run(numbers: range) -> None:
        for number in numbers:
            sampling = SamplingParams(max_tokens=ANSWER, temperature=0)
            core.submit(GenerateRequest(id=str(number), prompt_ids=prompts[number], sampling=sampling))
        while core.has_work:
            for output in core.turn():
                assert output.error is None
                answers[output.id].extend(output.token_ids)
                cached[output.id] = output.cached_tokens

    run(range(4))
    run(range(4, 6))
    core.close()
    assert scheduler.stats.preemptions > 0
    assert cached["4"] > FAMILIES[family].get("sliding_window", 0)
    for number, prompt in enumerate(prompts):
        assert len(answers[str(number)]) == ANSWER
        check_greedy(reference, prompt, answers[str(number)])
