"""Scores on the runner of GPUs, on a CPU: those of the runner of CPUs, beside answers, and nothing waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_kit import EngineSize, make_engine, make_runner, reference_ops
from family_kit import random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models_device import NoReads
from test_models_score import FAMILIES, ITEMS, LABELS, Scorer, assert_same, run

from lowlat.engine.batch import GREEDY, PrefillChunk, StepPlan
from lowlat.engine.device_chunks import ChunkRows
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.score_task import ItemRows


@pytest.fixture(scope="module", params=FAMILIES)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return Scorer(tmp_path_factory.mktemp(request.param), request.param)


def engines(scorer: Scorer, **size: Any) -> tuple[Any, Any]:
    """The runner of GPUs, and that of CPUs."""
    sized = EngineSize(**{"pages": 200, "page_size": 4, "chunk_tokens": 64, "max_batch": 6, **size})
    mine = make_engine(scorer.model, sized, 2, ops=reference_ops())
    return mine, make_engine(scorer.model, sized, 2, ops=None)


def same_answers(mine: Any, theirs: Any, requests: list[GenerateRequest]) -> None:
    found, expected = run(mine, requests), run(theirs, requests)
    for request in requests:
        if request.score is None:
            assert found[request.id] == expected[request.id]
        else:
            assert_same(torch.tensor(found[request.id]), torch.tensor(expected[request.id]))
    assert not mine.executor._runner.fallbacks
    mine.close()
    theirs.close()


@pytest.mark.parametrize("chunk_tokens", [200, 16, 5])
def test_items_beside_answers(scorer: Scorer, chunk_tokens: int):
    """All in one step; at item boundaries; every item but the shortest cut. Twice: cold, and with the query cached."""
    mine, theirs = engines(scorer, chunk_tokens=chunk_tokens)
    sampling = SamplingParams(max_tokens=9, temperature=0)
    queries = [random_tokens(24, 51), random_tokens(7, 52), random_tokens(24, 51)]
    requests: list[GenerateRequest] = [
        GenerateRequest(id="a", prompt_ids=random_tokens(9, 3), sampling=sampling),
        *(scorer.request(query, ITEMS) for query in queries),
        *(scorer.request(queries[1], [item], together=False) for item in ITEMS),
        GenerateRequest(id="b", prompt_ids=random_tokens(30, 4), sampling=sampling),
    ]
    same_answers(mine, theirs, requests)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(1, 24), min_size=1, max_size=7)), min_size=1, max_size=3
    ),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_any_lengths(scorer: Scorer, scored: list[tuple[int, list[int]]], chunk: int, page_size: int):
    mine, theirs = engines(scorer, pages=400, page_size=page_size, chunk_tokens=chunk)
    requests = [
        scorer.request(random_tokens(query, 7), [random_tokens(length, n) for n, length in enumerate(items)])
        for query, items in scored
    ]
    same_answers(mine, theirs, requests)


def begun(scorer: Scorer) -> DeviceRunner:
    _, runner = make_runner(scorer.model, EngineSize(pages=64, max_batch=4), reference_ops())
    assert isinstance(runner, DeviceRunner)
    return runner


def score_step(step: int, slot: int, begins: bool) -> StepPlan:
    query, lengths = random_tokens(9, slot), [3, 1, 4]
    tokens = query + [token for n, length in enumerate(lengths) for token in random_tokens(length, n)]
    chunk = PrefillChunk(slot, 0, tokens, False, [], 0, [11, 12, 16], [LABELS] * 3, ItemRows(9, 0, lengths))
    pages = [(slot, 0, list(range(slot * 12, slot * 12 + 12)))] if begins else []
    return StepPlan(step, [(slot, GREEDY)] if begins else [], pages, [chunk], [], windows=pages)


def llama(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    return Scorer(tmp_path_factory.mktemp("plain"), "Llama")


def test_launches_ask_the_device_nothing(tmp_path_factory, monkeypatch):
    runner = begun(llama(tmp_path_factory))
    plans = [score_step(step, step % 2, step < 2) for step in range(4)]
    for name in ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, what=name, **__: pytest.fail(f"Tensor.{what}"))
    with NoReads() as watch:
        pending = [runner.launch(plan) for plan in plans]
    assert watch.calls > 100
    monkeypatch.undo()
    results = [one.wait().label_logprobs for one in pending]
    assert results[0] == results[2] != results[1] == results[3]


def test_a_row_that_is_not_numbers_ends_its_own_request_alone(tmp_path_factory):
    runner = begun(llama(tmp_path_factory))
    both = score_step(0, 0, True)
    other = score_step(0, 1, True)
    both.begins += other.begins
    both.pages += other.pages
    both.chunks += other.chunks
    expected = runner.run(both).label_logprobs[1]
    runner.kv.keys[0][0] = float("nan")
    again = StepPlan(1, [], [], [PrefillChunk(0, 9, [5, 6], False, [], 0, [1], [LABELS], ItemRows(9, 0, [2]))], [])
    again.chunks += other.chunks
    result = runner.run(again)
    assert result.bad_slots == [0]
    assert_same(torch.tensor(result.label_logprobs[1]), torch.tensor(expected))


def test_every_row_of_a_step_belongs_to_one_segment():
    """Padding too, and that of decode rows: attention writes the rows of every segment."""
    for chunk in (1, 15, 16, 130, 512):
        for decodes in range(9):
            plan = StepPlan(0, [], [], [PrefillChunk(0, 0, [1] * chunk, False)], list(range(1, decodes + 1)))
            found = ChunkRows(plan, [5] * 12, 12)
            kind = found.kind
            split = np.split(found.packed(), [5 * kind.rows, 5 * kind.rows + 5 * kind.segments])
            segments_5B, decodes_4C = split[1].reshape(5, -1), split[2].reshape(4, -1)
            covered = [
                row
                for _, first, rows in [*segments_5B[:3].T.tolist(), *decodes_4C[:3].T.tolist()]
                for row in range(first, first + rows)
            ]
            assert sorted(covered) == list(range(kind.rows))
            assert (decodes_4C[2] == 1).all()
            assert decodes_4C[3].tolist() == [6] * decodes + [0] * (kind.decodes - decodes)


def test_steps_of_many_sizes_are_few_kinds():
    kinds = set()
    for rows in range(900, 1025):
        plan = StepPlan(0, [], [], [PrefillChunk(0, 0, [1] * rows, False)], [1] * (rows % 3))
        found = ChunkRows(plan, [0, 5], 2)
        numbers = found.packed()
        assert len(numbers) == 5 * found.kind.rows + 5 * found.kind.segments + 4 * found.kind.decodes
        assert found.kind.rows >= rows + rows % 3
        assert found.longest == rows
        kinds.add(found.kind)
    assert len(kinds) <= 12
