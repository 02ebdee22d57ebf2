"""`Engine.score` and its plans: both modes over one and two ranks, beside transformers."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
import transformers

from lowlat.engine.client import EngineClient
from lowlat.engine.config import EngineConfig
from lowlat.engine.score_client import async_score
from lowlat.engine.scoring import ScoreInput, ScoreLimits, can_mis, choose_mode, plan_score, score_of
from lowlat.offline import Engine
from tiny_tokenizer import byte_tokenizer

LABELS = [5, 17, 60]
QUERY = [(3 * n + 1) % 101 for n in range(37)]
ITEMS = [[(7 * n + k) % 101 for k in range(1 + 3 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """A random model, and what transformers says of the probabilities."""
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
        initializer_range=0.1,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(101))
    with torch.inference_mode():
        rows = [model(torch.tensor([QUERY + item])).logits[0, -1].softmax(-1) for item in ITEMS]
    return path, [row[LABELS].tolist() for row in rows]


def check(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_modes_give_the_probabilities_of_transformers(reference: tuple[Path, list[list[float]]], ranks: int):
    path, expected = reference
    with Engine(
        model=str(path), tensor_parallel=ranks, threads=1, kv_tokens=512, chunk_tokens=24, max_batch=4, dtype="float32"
    ) as engine:
        stats = engine._core.stats
        check(engine.score(QUERY, ITEMS, LABELS, mode="sis"), expected)
        # The first brings the query into the cache: whole pages of 16, for each of the five others.
        assert stats().cached_tokens == 5 * 32
        assert stats().prompt_tokens == sum(len(QUERY) + len(item) for item in ITEMS)
        check(engine.score(QUERY, ITEMS, LABELS, mode="mis"), expected)
        assert stats().cached_tokens == 6 * 32
        prompts = stats().prompt_tokens
        each = engine.score(QUERY, ITEMS, [[LABELS[n % 3]] for n in range(6)])
        check(each, [[row[n % 3]] for n, row in enumerate(expected)])
        assert stats().prompt_tokens - prompts == len(QUERY) + sum(map(len, ITEMS))  # one sequence: auto took mis
        shares = engine.score(QUERY, ITEMS, LABELS, apply_softmax=True, temperature=2.0)
        roots = [[math.sqrt(value) for value in row] for row in expected]
        check(shares, [[root / sum(row) for root in row] for row in roots])
        first = engine.score(QUERY, ITEMS[1:2], LABELS, item_first=True)
        assert first[0] != pytest.approx(expected[1], rel=1e-2)
        assert engine.score(QUERY, [], LABELS) == []
        assert engine.score("ab", ["c", ""], LABELS)[0] == pytest.approx(engine.score("abc", [[]], LABELS)[0], rel=1e-4)


def test_what_cannot_be_scored(reference: tuple[Path, list[list[float]]]):
    with Engine(model=str(reference[0]), threads=1, kv_tokens=512) as engine:
        for query, items, labels in (
            ([1], [[2]], []),
            ([1], [[2]], [3, 3]),
            ([1], [[2]], [101]),
            ([1], [[2]], [-1]),
            ([1], [[2]], [[1], [2]]),
            ([1], [[101]], [1]),
            ([1], [[2] * 128], [1]),
            ([], [[]], [1]),
        ):
            with pytest.raises(ValueError, match=r"labels|vocabulary|tokens"):
                engine.score(query, items, labels)
        assert len(engine.score([1], [[2] * 127], [1])) == 1


def test_from_asyncio(reference: tuple[Path, list[list[float]]]):
    path, expected = reference

    async def run() -> list[list[list[list[float]]]]:
        client = EngineClient(EngineConfig(model=str(path), threads=1, kv_tokens=512, chunk_tokens=24))
        await client.start()
        try:
            await client.wait_ready(120)
            asked = ScoreInput(query=QUERY, items=ITEMS, labels=[LABELS])
            return await asyncio.gather(*(async_score(client, asked, mode) for mode in ("sis", "mis", "auto")))
        finally:
            await client.close()

    for readings in asyncio.run(run()):
        check([score_of(places[0], False, 1.0) for places in readings], expected)


LIMITS = ScoreLimits(max_context=128, max_batch=4, page_size=16, chunk_tokens=32, item_tokens=32)


def asked_of(query: int, items: list[int], **fields: object) -> ScoreInput:
    return ScoreInput(query=[1] * query, items=[[2] * n for n in items], labels=[[3]], **fields)  # type: ignore[arg-type]


def test_when_one_sequence_is_possible():
    assert can_mis(asked_of(20, [8, 8]), LIMITS) is None
    for asked, why in (
        (asked_of(20, [8, 33]), "at most 32 tokens"),
        (asked_of(20, [8], item_first=True), "item_first"),
        (asked_of(100, [20, 20]), "places"),
    ):
        assert why in (can_mis(asked, LIMITS) or "")
        assert choose_mode(asked, LIMITS, "mis") == "sis"
    assert choose_mode(asked_of(20, [8, 8]), LIMITS) == "mis"
    assert choose_mode(asked_of(20, [8]), LIMITS) == "sis"
    assert choose_mode(asked_of(20, [8, 8]), LIMITS, "sis") == "sis"
    roomy = ScoreLimits(max_context=512, max_batch=4, page_size=16, chunk_tokens=128, item_tokens=512)
    assert choose_mode(asked_of(20, [100, 28]), roomy) == "mis"
    assert choose_mode(asked_of(20, [100, 29]), roomy) == "sis"  # 64.5 tokens on average
    assert choose_mode(asked_of(20, [100, 29]), roomy, "mis") == "mis"


def test_waves():
    plan = plan_score(asked_of(20, [8] * 10), "sis", LIMITS)
    assert [len(wave) for wave in plan.waves] == [1, 4, 4, 1]
    assert (plan.most, plan.prompt_tokens) == (4, 280)
    # Without a whole page in common there is nothing to wait for.
    assert [len(wave) for wave in plan_score(asked_of(15, [8] * 6), "sis", LIMITS).waves] == [4, 2]
    assert [len(wave) for wave in plan_score(asked_of(20, [8] * 2, item_first=True), "sis", LIMITS).waves] == [2]
    together = plan_score(asked_of(20, [8, 0, 8]), "mis", LIMITS)
    assert [sequence.items for wave in together.waves for sequence in wave] == [[0, 2], [1]]
    assert plan_score(asked_of(20, []), "mis", LIMITS).waves == []


def test_scores_of_log_probabilities():
    assert score_of([-1.0, -2.0], False, 1.0) == pytest.approx([math.exp(-1), math.exp(-2)])
    assert sum(score_of([-800.0, -801.0], True, 1.0)) == pytest.approx(1)
    assert score_of([-3.0, -3.0 - 700], True, 0.01) == [1.0, 0.0]
    assert score_of([-math.inf, -1.0], True, 1.0) == [0.0, 1.0]
    assert score_of([-math.inf, -math.inf], True, 1.0) == [0.0, 0.0]
