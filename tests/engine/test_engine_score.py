"""Scoring requests in the scheduler: chunks, prefix cache, preemption, on a device without arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_simulator import KVSimulator, drain, make_core, make_request, solo_answer, solo_scores

from lowlat.cache.windows import WindowPages
from lowlat.engine.batch import PlanLimits, PrefillChunk, StepPlan, decode_plan, encode_plan
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.score_task import ItemRows, ScoreProgress, ScoreTask, begin_score

NOTHING = SamplingParams(max_tokens=0)


def score_request(
    name: str, query: list[int], items: list[list[int]], labels: list[list[int]] | None = None, priority: int = 0
) -> GenerateRequest:
    """All items in one sequence, read after the last token of each."""
    ends = np.cumsum([len(query), *map(len, items)])[1:] - 1
    task = ScoreTask(rows=ends.tolist(), labels=labels or [[1, 2]], items=[len(item) for item in items])
    prompt = query + [token for item in items for token in item]
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=NOTHING, score=task, priority=priority)


def check_scores(core: EngineCore, device: KVSimulator, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    scores: dict[str, list[list[float]]] = {}
    answers = drain(core, device, scores)
    for request in requests:
        if request.score is not None:
            assert scores[request.id] == solo_scores(request), request.id
        else:
            assert answers[request.id] == solo_answer(request)
    return answers


def test_items_see_the_query_and_themselves():
    core, device = make_core(chunk_tokens=100)
    request = score_request("a", [7, 8, 9, 4, 5], [[1], [2, 3], [4], [1, 2, 3, 4, 5, 6]])
    core.submit(request)
    check_scores(core, device, [request])
    assert device.rows == 15
    assert device.most_chunks == 1


def test_the_query_alone_stays_in_the_cache():
    core, device = make_core(page_size=4)
    first = score_request("a", list(range(10)), [[1, 2, 3, 4, 5, 6, 7, 8], [9]])
    core.submit(first)
    check_scores(core, device, [first])
    pool = core.scheduler.cache.pool
    assert (pool.cached, pool.held) == (2, 0)  # two whole pages of ten tokens
    rows = device.rows
    second = score_request("b", list(range(10)), [[5], [1, 2]])
    core.submit(second)
    check_scores(core, device, [second])
    assert device.rows - rows == 2 + 3
    assert core.scheduler.stats.cached_tokens == 8
    # A prompt that goes on like the first item does not find that item's rows.
    plain = make_request("c", [*range(10), 1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    core.submit(plain)
    check_scores(core, device, [plain])
    assert core.scheduler.stats.cached_tokens == 16


def test_requests_of_one_query_that_come_together_compute_it_once():
    core, device = make_core(pages=200, chunk_tokens=64, max_batch=8, max_context=200)
    query = [n % 10 for n in range(130)]
    requests = [score_request(f"s{n}", query, [[n], [1, 2, 3]]) for n in range(6)]
    plain = make_request("plain", [n % 7 for n in range(30)], 4)
    for request in [*requests, plain]:
        core.submit(request)
    check_scores(core, device, [*requests, plain])
    # The query once; of the others, what its last page has not.
    assert device.rows == 130 + 6 * 4 + 5 * 2 + 30 + 3


TOKENS_OF_ONE = [n % 10 for n in range(100)]


@pytest.mark.parametrize(
    ("second", "rows"),
    [
        ({"prompt": [*TOKENS_OF_ONE[:80], 7, 7]}, 100 + 2),
        ({"prompt": TOKENS_OF_ONE}, 100 + 4),
        ({"prompt": [*TOKENS_OF_ONE[:62], 7, 7]}, 100 + 64),  # too little to wait for
        ({"prompt": TOKENS_OF_ONE, "cache_salt": "other"}, 200),
        ({"prompt": TOKENS_OF_ONE, "priority": 1}, 200),  # waits for no one below it
        ({"prompt": TOKENS_OF_ONE, "prompt_logprobs": 0}, 200),  # wants rows that a cache has not
    ],
)
def test_who_waits_for_a_prefix(second, rows):
    core, device = make_core(pages=100, chunk_tokens=50, max_context=120)
    core.submit(make_request("first", TOKENS_OF_ONE, 1))
    core.turn()
    core.submit(make_request("second", max_tokens=1, **second))
    drain(core, device)
    assert device.rows == rows


def test_nobody_waits_for_one_that_is_gone():
    core, device = make_core(pages=100, chunk_tokens=10, max_context=120)
    core.submit(make_request("first", TOKENS_OF_ONE, 1))
    core.submit(make_request("second", TOKENS_OF_ONE, 1))
    core.turn()
    assert core.scheduler.refresh_stats().waiting == 1
    core.abort("first")
    drain(core, device)
    assert core.scheduler.stats.finished == 1


def test_what_a_cancelled_request_has_launched_is_found():
    core, device = make_core(pages=100, chunk_tokens=50, max_context=120, run_ahead=1)
    core.submit(make_request("first", TOKENS_OF_ONE, 1))
    core.turn()
    assert core.scheduler.in_flight == 1
    core.abort("first")
    core.submit(make_request("second", TOKENS_OF_ONE, 1))
    drain(core, device)
    assert device.rows == 100 + 4
    assert core.scheduler.stats.cached_tokens == 96


def test_a_whole_query_of_whole_pages_is_found():
    core, device = make_core(page_size=4)
    for name in "ab":
        request = score_request(name, list(range(8)), [[5], [6, 7]])
        core.submit(request)
        check_scores(core, device, [request])
    assert core.scheduler.stats.cached_tokens == 8
    assert device.rows == 11 + 3


def test_rows_in_the_middle_are_computed_though_they_are_cached():
    core, device = make_core(page_size=4)
    prompt = list(range(20))
    for name in "ab":
        task = ScoreTask(rows=[9, 15, 19], labels=[[1], [2, 3], [4]])
        request = GenerateRequest(id=name, prompt_ids=prompt, sampling=NOTHING, score=task)
        core.submit(request)
        check_scores(core, device, [request])
    assert core.scheduler.stats.cached_tokens == 8  # the whole pages before row 9


def test_chunks_end_where_items_end():
    progress = ScoreProgress(20, ScoreTask(rows=[8, 12, 19], labels=[[1]], items=[3, 4, 7]), 5)
    assert progress.query == 6
    assert progress.end(0, 4) == 4  # inside the query
    assert progress.end(0, 8) == 6  # the first item does not fit beside the query
    assert progress.end(0, 12) == 9
    assert progress.end(6, 10) == 9
    assert progress.end(13, 17) == 17  # an item longer than what is left is cut
    assert progress.item_rows(0, 9) == ItemRows(6, 0, [3])
    assert progress.item_rows(6, 13) == ItemRows(6, 0, [3, 4])
    assert progress.item_rows(17, 20) == ItemRows(6, 4, [3])
    assert progress.item_rows(0, 6) is None
    assert progress.end(15, 20) == 20
    assert progress.places == 6 + 7
    assert [progress.place(row) for row in (0, 5, 6, 9, 13, 17)] == [0, 5, 6, 6, 6, 10]


def test_after_a_preemption_items_that_are_done_are_left_out():
    core, device = make_core(pages=14, page_size=2, chunk_tokens=6, max_context=28, max_batch=2)
    low = score_request("low", [1, 2, 3, 4, 5], [[n, n + 1, n + 2] for n in range(7)])
    core.submit(low)
    while core.scheduler._live["low"].score.read < 4:
        core.turn()
    rows = device.rows
    high = make_request("high", list(range(20)), 4, ignore_eos=True, priority=1)
    scores: dict[str, list[list[float]]] = {}
    core.submit(high)
    for output in core.scheduler.take_outputs():
        scores.setdefault(output.id, []).extend(output.scores or [])
    drain(core, device, scores)
    assert core.scheduler.stats.preemptions == 1
    # The query's last token at least, and three items at most: not the four that were read before.
    assert device.rows - rows - 23 <= 5 + 9
    assert scores["low"][-3:] == solo_scores(low)[-3:]


TOKENS = st.integers(0, 9)
QUERY = st.lists(TOKENS, max_size=12)
ITEMS = st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(QUERY, ITEMS, st.integers(0, 1)), min_size=1, max_size=4),
    st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=12), st.integers(0, 1)), max_size=3),
    st.integers(1, 4),
    st.integers(3, 20),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 6),
    st.sampled_from([0, 0, 1, 5]),
    st.sampled_from([1, 5, 64]),
)
def test_any_mixture_of_scores_and_answers(
    scored, plain, page_size, chunk_tokens, run_ahead, prefix_cache, turns, window, worth
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowlat.engine.prefix_waits.WORTH_WAITING", worth)
        check_mixture(scored, plain, page_size, chunk_tokens, run_ahead, prefix_cache, turns, window)


def check_mixture(scored, plain, page_size, chunk_tokens, run_ahead, prefix_cache, turns, window):
    core, device = make_core(
        pages=80 // page_size,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        run_ahead=run_ahead,
        max_context=72,
        prefix_cache=prefix_cache,
        window=window,
    )
    requests = [score_request(f"s{n}", query, items, None, level) for n, (query, items, level) in enumerate(scored)]
    requests += [make_request(f"p{n}", prompt, 6, priority=level) for n, (prompt, level) in enumerate(plain)]
    scores: dict[str, list[list[float]]] = {}
    answers: dict[str, list[int]] = {}
    for request in requests:
        core.submit(request)
        for _ in range(turns):
            for output in core.turn():
                answers.setdefault(output.id, []).extend(output.token_ids)
                scores.setdefault(output.id, []).extend(output.scores or [])
    for name, tokens in drain(core, device, scores).items():
        answers.setdefault(name, []).extend(tokens)
    for request in requests:
        if request.score is not None:
            assert scores[request.id] == solo_scores(request)
        else:
            assert answers[request.id] == solo_answer(request)
    assert core.scheduler.cache.pool.held == 0


def test_an_item_that_no_window_has_room_for_is_refused():
    core, device = make_core(page_size=2, chunk_tokens=4, max_batch=1, window=3, max_context=80)
    room = core.scheduler.cache.windows.total * 2
    fits = score_request("fits", [1, 2, 3], [[4], [5] * (room - 8)], None, 0)
    core.submit(fits)
    scores: dict[str, list[list[float]]] = {}
    drain(core, device, scores)
    assert scores["fits"] == solo_scores(fits)
    with pytest.raises(ValueError, match="send it by itself"):
        core.submit(score_request("long", [1, 2, 3], [[4], [5] * (room + 8)], None, 0))


def test_a_plan_keeps_its_items_on_the_way_to_other_ranks():
    limits = PlanLimits(max_batch=3, max_rows=12, max_pages=4)
    chunks = [
        PrefillChunk(0, 3, [1, 2, 3, 4, 5], False, [], 0, [2, 4], [[7], [8]], ItemRows(4, 2, [2, 1, 1])),
        PrefillChunk(1, 0, [6], True),
        PrefillChunk(2, 0, [1, 2, 3, 4, 5, 6], False, [], 0, [0, 1, 2, 3, 4, 5], [[1]] * 6, ItemRows(0, 0, [1] * 6)),
    ]
    record = np.zeros(limits.words, dtype=np.int32)
    encode_plan(StepPlan(5, [], [], chunks, [2, 1]), record, None)
    found = decode_plan(record, None)
    for sent, got in zip(chunks, found.chunks, strict=True):
        assert (got.slot, got.start, got.tokens, got.sample) == (sent.slot, sent.start, sent.tokens, sent.sample)
        assert (got.read_rows, got.items) == (sent.read_rows, sent.items)
    assert found.decodes == [2, 1]


def test_what_does_not_fit_is_refused():
    core, _ = make_core()
    task = ScoreTask(rows=[2], labels=[[1]], items=[1])
    for changes in (
        {"rows": []},
        {"rows": [3]},
        {"rows": [2, 2]},
        {"rows": [-1]},
        {"items": [0, 1]},
        {"items": [4]},
        {"labels": [[1], [2]]},
    ):
        fields = {"rows": task.rows, "labels": task.labels, "items": task.items} | changes
        bad = GenerateRequest(id="bad", prompt_ids=[1, 2, 3], sampling=NOTHING, score=ScoreTask(**fields))
        try:
            core.submit(bad)
        except ValueError:
            continue
        raise AssertionError(changes)


def test_places_do_not_grow_with_the_number_of_items():
    core, device = make_core(pages=10, page_size=2, chunk_tokens=6, max_context=20)
    request = score_request("a", [1, 2, 3, 4, 5], [[n % 10] * (n % 4 + 1) for n in range(100)])
    assert len(request.prompt_ids) > 20 * 10
    core.submit(request)
    check_scores(core, device, [request])
    assert device.rows == len(request.prompt_ids)
    # An item longer than a chunk, in the middle: it has all its places, and only it.
    long = score_request("b", [1, 2, 3], [[4, 5], list(range(15)), [6], [7, 8]])
    core.submit(long)
    check_scores(core, device, [long])


def test_an_item_that_the_windows_have_no_room_for_is_refused_by_its_length():
    task = ScoreTask(rows=[39], labels=[[1]], items=[30])
    windows = WindowPages(4, 4, 4, 4)
    with pytest.raises(ValueError, match=r"an item of 30 tokens is too long .* room for 16 tokens"):
        begin_score(task, 40, 0, 8, windows)
    assert begin_score(task, 40, 0, 8, None).query == 10
    assert begin_score(ScoreTask(rows=[11], labels=[[1]], items=[2]), 12, 0, 8, windows).places == 12
