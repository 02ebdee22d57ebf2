"""Scores of real arithmetic: items in one sequence equal one sequence an item, and both equal transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_kit import VOCABULARY, build, expected_logits, make_engine, random_tokens, save_random
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.score_task import ScoreTask

# Small weights, as trained models have relative to their width: logits of a few units, so 1e-5 is above rounding.
SMALL: dict[str, Any] = {"initializer_range": 0.08}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "GptOss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    },
}
LABELS = [3, 77, 130, 0]


class Scorer:
    """A tiny random model behind the whole engine but the processes."""

    def __init__(self, path: Path, family: str) -> None:
        self.reference = save_random(path, family, **SMALL, **FAMILIES[family])
        self.model = build(path)
        self.names = 0

    def engine(self, pages: int = 200, page_size: int = 4, chunk_tokens: int = 64) -> EngineCore:
        return make_engine(self.model, pages=pages, page_size=page_size, chunk_tokens=chunk_tokens, max_batch=6)

    def request(
        self, query: list[int], items: list[list[int]], *, together: bool = True, **fields: Any
    ) -> GenerateRequest:
        self.names += 1
        prompt = query + [token for item in items for token in item]
        rows, end = [], len(query)
        for item in items:
            end += len(item)
            rows.append(end - 1)
        task = ScoreTask(rows=rows, labels=[LABELS], items=[len(item) for item in items] if together else [])
        sampling = SamplingParams(max_tokens=0)
        return GenerateRequest(id=f"{self.names}", prompt_ids=prompt, sampling=sampling, score=task, **fields)


def run(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, Any]:
    """Scores by request id, or tokens of those that answer."""
    found: dict[str, list[Any]] = {request.id: [] for request in requests}
    for request in requests:
        core.submit(request)
    while core.has_work:
        for output in core.turn():
            assert output.error is None
            found[output.id].extend(output.scores or output.token_ids)
    core.scheduler.check()
    return found


def one_by_one(scorer: Scorer, core: EngineCore, query: list[int], items: list[list[int]]) -> torch.Tensor:
    """Each item behind the query in a sequence of its own: [items, labels]."""
    requests = [scorer.request(query, [item], together=False) for item in items]
    found = run(core, requests)
    return torch.tensor([found[request.id][0] for request in requests])


def together(scorer: Scorer, core: EngineCore, query: list[int], items: list[list[int]]) -> torch.Tensor:
    request = scorer.request(query, items)
    return torch.tensor(run(core, [request])[request.id])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return Scorer(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return Scorer(tmp_path_factory.mktemp("plain"), "Llama")


ITEMS = [random_tokens(length, 60 + length) for length in (1, 8, 3, 1, 20, 8)]


def test_one_sequence_an_item_equals_transformers(scorer: Scorer):
    query = random_tokens(23, 50)
    core = scorer.engine()
    expected = torch.stack(
        [expected_logits(scorer.reference, query + item)[-1].log_softmax(-1)[LABELS] for item in ITEMS]
    )
    assert_same(one_by_one(scorer, core, query, ITEMS), expected)
    assert_same(one_by_one(scorer, core, query, ITEMS), expected)
    assert core.scheduler.stats.cached_tokens > 0
    core.close()


@pytest.mark.parametrize("chunk_tokens", [200, 16, 5])
def test_items_together_equal_items_alone(scorer: Scorer, chunk_tokens: int):
    """Chunk sizes: all in one step; at item boundaries; every item but the shortest cut. Then all from the cache."""
    query = random_tokens(24, 51)
    core = scorer.engine(chunk_tokens=chunk_tokens)
    expected = one_by_one(scorer, scorer.engine(), query, ITEMS)
    steps = core.scheduler.stats.step
    assert_same(together(scorer, core, query, ITEMS), expected)
    assert (core.scheduler.stats.step - steps == 1) == (chunk_tokens == 200)
    assert_same(together(scorer, core, query, ITEMS), expected)
    assert core.scheduler.stats.cached_tokens == 24
    assert core.scheduler.cache.pool.cached == 6
    core.close()


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 30),
    st.lists(st.integers(1, 24), min_size=1, max_size=7),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 1000),
)
def test_any_lengths(scorer: Scorer, query_tokens: int, lengths: list[int], chunk: int, page_size: int, seed: int):
    query = random_tokens(query_tokens, seed)
    items = [random_tokens(length, seed + number + 1) for number, length in enumerate(lengths)]
    core = scorer.engine(pages=400, page_size=page_size, chunk_tokens=chunk)
    expected = torch.stack(
        [expected_logits(scorer.reference, query + item)[-1].log_softmax(-1)[LABELS] for item in items]
    )
    assert_same(together(scorer, core, query, items), expected)
    core.close()


def test_order_and_neighbours_do_not_matter(scorer: Scorer):
    query, core = random_tokens(17, 52), scorer.engine()
    scores = together(scorer, core, query, ITEMS)
    order = [4, 0, 5, 2, 1, 3]
    assert_same(together(scorer, core, query, [ITEMS[place] for place in order]), scores[order])
    changed = [*ITEMS[:2], random_tokens(5, 99), *ITEMS[3:]]
    others = [0, 1, 3, 4, 5]
    moved = together(scorer, core, query, changed)
    assert_same(moved[others], scores[others])
    assert (moved[2] - scores[2]).abs().max() > 1e-3
    core.close()


def test_beside_answers_and_other_scores(scorer: Scorer):
    """A batch of scores between requests that decode: all as if alone, and both kinds share steps."""
    queries = [random_tokens(length, 53 + length) for length in (5, 19, 30)]
    alone = scorer.engine()
    expected = [one_by_one(scorer, alone, query, ITEMS) for query in queries]
    prompts = [random_tokens(12, 80), random_tokens(7, 81)]
    sampling = SamplingParams(max_tokens=12, temperature=0)
    plain = [GenerateRequest(id=f"plain {n}", prompt_ids=ids, sampling=sampling) for n, ids in enumerate(prompts)]
    answers = run(alone, plain)
    alone.close()
    core = scorer.engine(chunk_tokens=20)
    scores = [scorer.request(query, ITEMS) for query in queries]
    found = run(core, [plain[0], *scores, plain[1]])
    for request, wanted in zip(scores, expected, strict=True):
        assert_same(torch.tensor(found[request.id]), wanted)
    for request in plain:
        assert found[request.id] == answers[request.id]
    # Shared steps: fewer than the rows of scores alone would take.
    prompt_tokens = sum(len(request.prompt_ids) for request in [*scores, *plain])
    assert core.scheduler.stats.step < prompt_tokens // 20 + 12
    core.close()


def test_preempted_and_taken_up_again(llama: Scorer):
    core = llama.engine(pages=30, page_size=2, chunk_tokens=8)
    query = random_tokens(9, 54)
    expected = one_by_one(llama, llama.engine(), query, ITEMS)
    score = llama.request(query, ITEMS)
    core.submit(score)
    scores: list[list[float]] = []
    while not scores:
        for output in core.turn():
            scores.extend(output.scores or [])
    prompt = random_tokens(40, 55)
    high = GenerateRequest(id="high", prompt_ids=prompt, sampling=SamplingParams(max_tokens=4), priority=1)
    core.submit(high)
    while core.has_work:
        for output in core.turn():
            scores.extend(output.scores or [])
    assert core.scheduler.stats.preemptions == 1
    assert_same(torch.tensor(scores), expected)
    core.close()


def test_rows_inside_a_prompt(llama: Scorer):
    """Labels of their own at rows of the query and of the items."""
    tokens = random_tokens(20, 56)
    labels = [[1], [2, 3], [VOCABULARY - 1]]
    task = ScoreTask(rows=[4, 13, 17], labels=labels, items=[4, 6])
    core = llama.engine()
    request = GenerateRequest(id="a", prompt_ids=tokens, sampling=SamplingParams(max_tokens=0), score=task)
    first, second, third = run(core, [request])["a"]
    query = tokens[:10]
    for found, prompt, ids in (
        (first, tokens[:5], labels[0]),
        (second, query + tokens[10:14], labels[1]),
        (third, query + tokens[14:18], labels[2]),
    ):
        assert_same(torch.tensor(found), expected_logits(llama.reference, prompt)[-1].log_softmax(-1)[ids])
    core.close()


def test_plain_products_do_the_same(scorer: Scorer, monkeypatch: pytest.MonkeyPatch):
    query, core = random_tokens(24, 51), scorer.engine()
    expected = together(scorer, core, query, ITEMS)
    monkeypatch.setattr("lowlat.layers.item_attention._FUSED", None)
    assert_same(together(scorer, core, query, ITEMS), expected)
    core.close()


def test_long_lists_and_items_go_block_by_block(scorer: Scorer, monkeypatch: pytest.MonkeyPatch):
    query, core = random_tokens(24, 51), scorer.engine()
    expected = together(scorer, core, query, ITEMS)
    monkeypatch.setattr("lowlat.layers.item_attention._SCORE_ENTRIES", 300)
    assert_same(together(scorer, core, query, ITEMS), expected)
    core.close()
