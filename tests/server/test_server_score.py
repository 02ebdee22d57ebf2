"""`/v1/score` over a scripted engine: fields, defaults, errors, limits, cancelling."""

from __future__ import annotations

import json
import math
import threading

import pytest
from server_kit import START, byte_text_model, ids, live_server, wait_for

from lowlat.server.score_requests import ScoreRequest

BODY = {"query": "q", "items": ["ab", "c"], "label_token_ids": [10, 20]}


def logprob(token: int, label: int) -> float:
    """What the scripted engine says."""
    return -(label + 1) / 100 - token / 1000


def score(live, **changes):
    answer = live.post("/v1/score", **BODY | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def close(actual, expected):
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for row, wanted in zip(actual, expected, strict=True):
        assert row == pytest.approx(wanted)


@pytest.mark.parametrize("mode", ["sis", "mis", "auto", None])
def test_probabilities_by_item_and_label(live, mode):
    answer = score(live, mode=mode, return_token_logprobs=True)
    logprobs = [[logprob(token, label) for label in (10, 20)] for token in b"bc"]
    close(answer["token_logprobs"], logprobs)
    close(answer["scores"], [[math.exp(value) for value in row] for row in logprobs])
    assert (answer["object"], answer["model"], answer["pooled_hidden_states"]) == ("scoring", "fake", None)
    assert answer["mode"] == ("sis" if mode == "sis" else "mis")
    tokens = 5 if mode == "sis" else 4
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 0


def test_shares_among_the_labels(live):
    answer = score(live, apply_softmax=True, temperature=0.5)
    weights = [math.exp(logprob(0, label) / 0.5) for label in (10, 20)]
    close(answer["scores"], [[weight / sum(weights) for weight in weights]] * 2)
    assert answer["token_logprobs"] is None


def test_labels_of_each_item(live):
    for mode in ("sis", "mis"):
        answer = score(live, label_token_ids=[[1, 2, 3], [4]], mode=mode, return_token_logprobs=True)
        close(answer["token_logprobs"], [[logprob(98, label) for label in (1, 2, 3)], [logprob(99, 4)]])


def test_token_ids_and_a_single_text(live):
    assert score(live, query=ids("q"), items=[ids("ab"), ids("c")])["scores"] == score(live)["scores"]
    assert score(live, items="ab")["scores"] == score(live)["scores"][:1]
    assert score(live, query=None)["scores"] == score(live)["scores"]
    # An item without tokens is read at the query's end.
    for mode in ("sis", "mis"):
        close(
            score(live, items=["", "ab"], mode=mode, return_token_logprobs=True)["token_logprobs"][:1],
            [[logprob(ord("q"), 10), logprob(ord("q"), 20)]],
        )


def test_no_items_are_no_scores(live):
    for labels in ([10], []):
        answer = live.post("/v1/score", query="q", items=[], label_token_ids=labels)
        if labels:
            assert answer.json()["scores"] == []
        else:
            assert answer.status_code == 400


def test_the_item_first(live):
    answer = score(live, item_first=True, return_token_logprobs=True)
    assert answer["mode"] == "sis"
    close(answer["token_logprobs"], [[logprob(ord("q"), label) for label in (10, 20)]] * 2)


def test_after_every_place_of_a_token(live):
    for mode in ("sis", "mis"):
        answer = score(live, items=["a;bc;", ";d"], score_extraction_token=";", mode=mode, return_token_logprobs=True)
        assert [len(places) for places in answer["scores"]] == [2, 1]
        for places in answer["token_logprobs"]:
            close(places, [[logprob(ord(";"), label) for label in (10, 20)]] * len(places))


def test_only_the_beginning_gets_the_models_frame():
    with live_server(text=byte_text_model(bos=True)) as server:
        plain = server.post("/v1/score", **BODY).json()["usage"]["prompt_tokens"]
        assert plain == 5  # one BOS before the query
        first = server.post("/v1/score", **BODY, item_first=True).json()["usage"]["prompt_tokens"]
        assert first == 2 + 2 + 3  # one before each item
        assert server.post("/v1/score", query=[START], items=[[1]], label_token_ids=[2]).status_code == 200


def test_many_items_come_in_waves(live):
    items = [[n % 250] for n in range(60)]
    answer = score(live, query="q" * 20, items=items, mode="sis", return_token_logprobs=True)
    close(answer["token_logprobs"], [[logprob(item[0], label) for label in (10, 20)] for item in items])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [[1], []]}, "label_token_ids[1]"),
        ({"label_token_ids": [[1]]}, "label_token_ids"),
        ({"label_token_ids": [1, [2]]}, "label_token_ids"),
        ({"label_token_ids": [5, 6, 5]}, "label_token_ids[2]"),
        ({"label_token_ids": [5, -1]}, "label_token_ids[1]"),
        ({"label_token_ids": [[5], [7, 260]]}, "label_token_ids[1][1]"),
        ({"label_token_ids": [5, 1.5]}, "label_token_ids[1]"),
        ({"label_token_ids": [[[5]]]}, "label_token_ids[0][0]"),
        ({"label_token_ids": list(range(1025))}, "label_token_ids"),
        ({"label_token_ids": "yes"}, "label_token_ids"),
        ({"items": None}, "items"),
        ({"items": [1, 2]}, "items[0]"),
        ({"items": [[[1]]]}, "items[0][0]"),
        ({"items": ["a", [1]]}, "items"),
        ({"items": [[1], [260]]}, "items[1][0]"),
        ({"items": ["a", "b" * 128]}, "items[1]"),
        ({"items": ["a"] * 4097}, "items"),
        ({"query": "", "items": ["a", ""]}, "items[1]"),
        ({"query": [[1]]}, "query[0]"),
        ({"query": [-1]}, "query[0]"),
        ({"query": [260]}, "query[0]"),
        ({"temperature": 0, "apply_softmax": True}, "temperature"),
        ({"temperature": -1, "apply_softmax": True}, "temperature"),
        ({"temperature": 2}, "temperature"),
        ({"apply_softmax": "yes"}, "apply_softmax"),
        ({"score_extraction_token": "ab"}, "score_extraction_token"),
        ({"score_extraction_token": "b"}, "items[1]"),
        ({"mode": "fast"}, "mode"),
        ({"mode": "mis", "item_first": True}, "mode"),
        ({"mode": "mis", "items": ["a", "b" * 101]}, "mode"),
        ({"return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
        ({"embed_override_token_id": 5}, "embed_override_token_id"),
        ({"query_embed_overrides": [[1.0]]}, "query_embed_overrides"),
        ({"item_embed_overrides": [[[1.0]]]}, "item_embed_overrides"),
        ({"delimiter": 1}, "delimiter"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_bad_fields_are_named(live, monkeypatch, changes, param):
    def queue(*_):
        raise AssertionError("a bad request reached the engine")

    monkeypatch.setattr(live.state.engine, "submit", queue)
    answer = live.post("/v1/score", **BODY | changes)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_temperature_that_is_no_number(live, value):
    text = json.dumps(BODY | {"apply_softmax": True, "temperature": "VALUE"}).replace('"VALUE"', value)
    answer = live.http.post("/v1/score", content=text)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature", answer.text


def test_no_op_values_of_what_is_not_supported(live):
    score(live, return_pooled_hidden_states=False, embed_override_token_id=None)


def test_an_answer_has_a_largest_size(live):
    answer = live.post("/v1/score", items=["a"] * 300, label_token_ids=[*range(10, 260)], query="q")
    assert answer.status_code == 200
    answer = live.post("/v1/score", items=["a"] * 1100, label_token_ids=[*range(10, 260)], query="q")
    assert answer.json()["error"]["param"] == "items"


def test_models_that_keep_state_score_one_by_one():
    with live_server({"item_tokens": 0}) as server:
        assert server.post("/v1/score", **BODY).json()["mode"] == "sis"
        refused = server.post("/v1/score", **BODY, mode="mis")
        assert refused.json()["error"]["param"] == "mode"
    with live_server(score_mode="sis") as server:
        assert server.post("/v1/score", **BODY).json()["mode"] == "sis"
        assert server.post("/v1/score", **BODY, mode="mis").json()["mode"] == "mis"


@pytest.mark.parametrize("mode", ["sis", "mis"])
def test_cancelled_in_the_middle(mode):
    with live_server({"hold_after": 0}) as server:
        found = {}

        def ask():
            found["answer"] = server.post("/v1/score", **BODY, mode=mode, request_id="mine")

        thread = threading.Thread(target=ask)
        thread.start()
        wait_for(lambda: "mine" in server.state.live)
        wait_for(lambda: server.state.engine.open_requests)
        assert server.http.delete("/v1/requests/score-mine").json()["cancelled"]
        thread.join()
        assert found["answer"].status_code == 409
        assert found["answer"].json()["error"]["code"] == "cancelled"
        wait_for(lambda: not server.state.live)
        assert server.state.open_sequences == 0
        assert server.metric('lowlat_sequences_total{finish_reason="abort"}') == 1


def test_what_ended_leaves_nothing(live):
    before = live.metric('lowlat_sequences_total{finish_reason="length"}')
    answer = live.post("/v1/score", **BODY)
    assert answer.json()["id"] == "score-" + answer.headers["x-request-id"]
    wait_for(lambda: not live.state.live)
    assert live.state.open_sequences == 0
    assert live.metric('lowlat_sequences_total{finish_reason="length"}') == before + 1


def test_a_full_queue_is_a_429():
    with live_server({"hold_after": 0}, max_queue=0) as server:
        limit = server.state.limit
        threads = [
            threading.Thread(target=server.post, args=("/v1/completions",), kwargs={"prompt": "a", "max_tokens": 1})
            for _ in range(limit)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.state.open_sequences == limit)
        assert server.post("/v1/score", **BODY).status_code == 429
        server.release()
        for thread in threads:
            thread.join()


def test_the_documentation_names_every_field(documented):
    assert [name for name in ScoreRequest.__struct_fields__ if f"`{name}`" not in documented] == []
