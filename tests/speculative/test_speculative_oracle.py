"""On the model's real weights, float32, greedy: answers with each proposer are those of plain decoding.

Prompts are the oracle's. Answers are compared up to the first token whose two best logits are nearer than 0.01, where
the number of a step's rows may decide. `make soak` compares 200 tokens, alone and eight at a time, after hits in the
prefix cache and after preemption, with all proposers; `make test` fewer tokens with two of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spec_kit import random_draft

from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine, Generation

DATA = Path(__file__).parent.parent / "data"
CASES = [
    case["input_ids"]
    for name in ("greedy", "greedy_long")
    for case in json.loads((DATA / f"smollm2_135m_instruct_fp32_{name}.json").read_text())["cases"]
]
SETTINGS: dict[str, Any] = {"model": "smollm2", "dtype": "float32", "threads": 1, "low_latency": "off"}
SURE_MARGIN = 0.01


def sure(answer: Generation) -> list[int]:
    """The answer up to its first near tie."""
    assert answer.logprobs is not None
    tokens = []
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        best = sorted((top.logprob for top in entry.top), reverse=True)
        if best[0] - best[1] < SURE_MARGIN:
            break
        tokens.append(token)
    return tokens


def plain_answers(prompts: list[list[int]], tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=2)
    with Engine(**SETTINGS, max_batch=1) as engine:
        return [sure(engine.generate(prompt, sampling)) for prompt in prompts]


def check(engine: Engine, prompts: list[list[int]], expected: list[list[int]], tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for answer, wanted in zip(engine.generate(prompts, sampling), expected, strict=True):
        assert len(answer.token_ids) == tokens
        assert answer.token_ids[: len(wanted)] == wanted


def proposer(kind: str, folder: Path) -> dict[str, Any]:
    """Settings of a proposer. DFlash drafts are random: their guesses are wrong, and must not show."""
    if kind == "draft-model":
        return {"spec": kind, "draft": "smollm2", "spec_width": 5}
    if kind in ("dflash", "dflash2"):
        shape = {"hidden_size": 576, "vocab_size": 49152, "num_target_layers": 30, "target_layer_ids": (1, 14, 27)}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "mask_token_id": 49151}
        draft = random_draft(folder / kind, kind, **shape, **heads)
        return {"spec": kind, "draft": str(draft), "spec_width": 4}
    return {"spec": kind, "spec_width": 7}


@pytest.mark.parametrize("kind", ["ngram", "dspark"])
def test_first_tokens_are_those_of_plain_decoding(kind: str, tmp_path: Path):
    prompts = CASES[2:5]
    expected = plain_answers(prompts, 16)
    assert sum(map(len, expected)) > 30
    with Engine(**SETTINGS, **proposer(kind, tmp_path), max_batch=3, kv_tokens=1024) as engine:
        check(engine, prompts, expected, 16)
        check(engine, prompts[2:], expected[2:], 16)
        assert engine.stats().cached_tokens > 0
        report = engine.speculation()
        assert report is not None
        assert report.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "dspark", "draft-model", "dflash", "dflash2"])
def test_long_answers_are_those_of_plain_decoding(kind: str, tmp_path: Path):
    tokens = 200
    prompts = [*CASES, CASES[0][:-3]]
    expected = plain_answers(prompts, tokens)
    print(f"{kind}: {sum(map(len, expected))} of {tokens * len(prompts)} tokens before a near tie")
    settings = SETTINGS | proposer(kind, tmp_path)
    with Engine(**settings, max_batch=1) as engine:
        for prompt, wanted in zip(prompts, expected, strict=True):
            check(engine, [prompt], [wanted], tokens)
        check(engine, prompts[-2:], expected[-2:], tokens)
        assert engine.stats().cached_tokens > 0
    longest = max(map(len, prompts)) + tokens
    with Engine(**settings, max_batch=8, kv_tokens=2 * longest) as engine:
        check(engine, prompts, expected, tokens)
        stats = engine.stats()
        assert stats.preemptions > 0
        print(f"{kind}: {stats.preemptions} preemptions, {stats.accepted_tokens} guesses right")
        assert kind.startswith("dflash") or stats.accepted_tokens > 0
