"""Scoring routes over the simulated engine: log-probabilities are ones, and nothing stays behind."""

from __future__ import annotations

import math

import pytest
from faults_kit import at_rest, simulated_server
from kv_simulator import digest_of, label_score
from server_kit import byte_text_model, byte_tokenizer, ids
from simulated_engine import label_logprob

from lowlat.engine.scoring import score_of

YES, NO = 259, 260


@pytest.fixture(scope="module")
def live():
    shape = {"pages": 200, "max_context": 400}
    with simulated_server(shape, text=byte_text_model(words=("Yes", "No"))) as server:
        yield server
        at_rest(server)


def readings(query: list[int], items: list[list[int]], labels: list[int]) -> list[list[float]]:
    """Log-probabilities of the labels behind each item."""
    digests = [digest_of(query + item) for item in items]
    return [[label_logprob(label_score(digest, label)) for label in labels] for digest in digests]


@pytest.mark.parametrize("mode", ["sis", "mis"])
def test_scores_are_those_of_each_item_alone(live, mode):
    labels = [7, 3, 200]
    body = {"query": "query", "items": ["a", "bc", "d" * 30], "label_token_ids": labels, "mode": mode}
    answer = live.post("/v1/score", **body, return_token_logprobs=True)
    assert answer.status_code == 200, answer.text
    expected = readings(ids("query"), [ids(item) for item in body["items"]], labels)
    assert answer.json()["token_logprobs"] == expected
    assert answer.json()["scores"] == [score_of(reading, False, 1.0) for reading in expected]
    assert all(sum(row) <= 1 for row in answer.json()["scores"])


def test_documents_by_their_share_of_yes(live):
    answer = live.post("/v1/rerank", query="who?", documents=[{"text": "one"}, "two", {"text": "three"}, "one"])
    assert answer.status_code == 200, answer.text
    frame = "<s>user\nJudge whether the document helps to answer the query.\n\nQuery: who?\n\nDocument: {}\n\n"
    frame += 'Is the document relevant to the query? Answer with "Yes" or "No" only.<e><s>assistant\n'
    encode = byte_tokenizer(words=("Yes", "No")).encode
    prompts = [encode(frame.format(text), False) for text in ("one", "two", "three", "one")]
    expected = [score_of(reading, True, 1.0)[0] for reading in readings([], prompts, [YES, NO])]
    results = answer.json()["results"]
    assert [result["index"] for result in results] == sorted(range(4), key=lambda n: (-expected[n], n))
    for result in results:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-9)
        assert 0 < result["label_mass"] < 1


def test_decisions_are_shares_of_a_whole(live):
    questions = [
        {"type": "yes_no", "question": "q"},
        {"type": "choice", "question": "q", "options": ["a", "b", "c"]},
        {"type": "score", "question": "q", "levels": 10},
    ]
    answer = live.post("/v1/decisions", input="x", questions=questions)
    assert answer.status_code == 200, answer.text
    for decision in answer.json()["answers"]:
        assert sum(decision["probabilities"]) == pytest.approx(1)
        assert 0 < decision["label_mass"] < 1
        best = max(decision["probabilities"])
        if decision["type"] == "score":
            assert 0 <= decision["score"] <= 9
        else:
            assert decision["choice"].lower() == decision["labels"][decision["probabilities"].index(best)].lower()
    assert math.isclose(sum(level * p for level, p in enumerate(decision["probabilities"])), decision["score"])
