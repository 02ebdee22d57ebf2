"""Answers of completions and chats, whole and streamed, against an engine whose tokens are scripted."""

import json
import re
from pathlib import Path

import pytest
from server_kit import END, START, byte_text_model, ids, live_server, scripted

from lowlat.server.requests import ChatRequest, GenerationFields, Unsupported


def joined(events, part):
    """Per choice index: the joined text of a stream and its finish reasons."""
    texts, reasons = {}, {}
    for event in events[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + part(choice)
            if choice["finish_reason"] is not None:
                reasons.setdefault(index, []).append(choice["finish_reason"])
    assert events[-1] == "[DONE]"
    return texts, reasons


def chat_part(choice):
    return choice["delta"].get("content", "")


def test_a_completion_has_text_usage_and_timings(live):
    answer = live.complete(prompt="abc", max_tokens=7)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("abcabca", "length", 0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    timings = answer["timings"]
    assert 0 <= timings["queue_s"] <= timings["first_token_s"] <= timings["total_s"]
    # Tokens that arrive together have no gap, and on a busy machine all may.
    assert 0 <= timings["gap_mean_ms"] <= 1e3 * timings["total_s"]
    assert 0 <= timings["gap_p90_ms"] <= 1e3 * timings["total_s"]
    assert "token_ids" not in choice


def test_one_token_has_no_gap(live):
    timings = live.complete(prompt="abc", max_tokens=1)["timings"]
    assert timings["gap_mean_ms"] is None
    assert timings["first_token_s"] > 0


def test_defaults_for_max_tokens(live):
    assert live.complete(prompt="abc")["usage"]["completion_tokens"] == 16
    usage = live.chat("abc")["usage"]
    assert usage["total_tokens"] == 128


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        ([97, 98], ["aba"]),
        ([[97], [98, 99]], ["aaa", "bcb"]),
    ],
)
def test_every_form_of_prompt(live, prompt, texts):
    answer = live.complete(prompt=prompt, max_tokens=3)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["completion_tokens"] == 3 * len(texts)


def test_a_chat_uses_the_template_and_a_stream_says_the_same(live):
    whole = live.chat("hi", max_tokens=40, return_token_ids=True)
    choice = whole["choices"][0]
    expected = [START, *ids("user\nhi"), END, START, *ids("assistant\n")]
    assert choice["prompt_token_ids"] == expected
    assert choice["message"]["role"] == "assistant"
    events = live.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=40)
    texts, reasons = joined(events, chat_part)
    assert texts == {0: choice["message"]["content"]}
    assert reasons == {0: ["length"]}
    roles = [event["choices"][0]["delta"].get("role") for event in events[:-1]]
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}
    assert events[0]["object"] == "chat.completion.chunk"
    assert "timings" in events[-2]
    assert all("usage" not in event for event in events[:-1])


def test_content_parts_are_joined_and_roles_kept(live):
    body = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "max_tokens": 1,
        "return_token_ids": True,
    }
    choice = live.post("/v1/chat/completions", **body).json()["choices"][0]
    assert bytes(choice["prompt_token_ids"][1:9]) == b"system\ns"
    assert bytes(choice["prompt_token_ids"][11:18]) == b"user\nab"


def test_usage_comes_in_the_stream_when_asked_for(live):
    events = live.events("/v1/completions", prompt="abc", max_tokens=5, stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    last = events[-2]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["timings"]["first_token_s"] > 0


def test_bos_is_added_once_to_text_never_to_ids_and_never_to_chats():
    with live_server(text=byte_text_model(bos=True)) as live:

        def prompt_ids(answer):
            return answer["choices"][0]["prompt_token_ids"]

        options = {"max_tokens": 1, "return_token_ids": True}
        assert prompt_ids(live.complete(prompt="ab", **options)) == [START, 97, 98]
        assert prompt_ids(live.complete(prompt="<s>ab", **options)) == [START, 97, 98]
        assert prompt_ids(live.complete(prompt=[97, 98], **options)) == [97, 98]
        assert prompt_ids(live.chat("ab", **options))[:2] == [START, ord("u")]


def test_end_of_sequence_and_stop_tokens(live):
    hello = scripted("hello") | {"prompt": "x", "max_tokens": 50}
    choice = live.complete(**hello, return_token_ids=True)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", None)
    assert choice["token_ids"] == [*ids("hello"), 256]
    assert live.complete(**hello, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    stopped = live.complete(**hello, stop_token_ids=[ord("l")])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == ord("l")
    assert stopped["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("burst", [1, 3, 26])
def test_a_stop_string_that_spans_tokens_never_shows(live, burst):
    # Found in other servers: the first pieces of a stop string were sent before its end was known.
    body = scripted("DEFGHIJKLMNOP", burst=burst) | {"prompt": "alphabet: ABC", "max_tokens": 50}
    body |= {"return_token_ids": True}
    choice = live.complete(**body, stop=["DEFGHIJ"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "DEFGHIJ")
    assert choice["token_ids"] == ids("DEFGHIJ")
    events = live.events("/v1/completions", **body, stop=["DEFGHIJ"])
    assert joined(events, lambda choice: choice["text"]) == ({0: ""}, {0: ["stop"]})
    later = live.complete(**body, stop=["nothing", "KL"])
    assert later["choices"][0]["text"] == "DEFGHIJ"
    assert later["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("burst", [1, 2, 5])
def test_no_delta_holds_half_a_character(live, burst):
    text = "ďábelské 🔥👋 社区"
    body = scripted(text, burst=burst) | {"prompt": "x", "max_tokens": 99}
    deltas = [e["choices"][0]["text"] for e in live.stream("/v1/completions", **body) if e != "[DONE]"]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("burst", [1, 4])
def test_streamed_logprobs_joined_equal_the_whole_ones(live, burst):
    script = scripted("héllo wörld", burst=burst)
    body = script | {"prompt": "x", "max_tokens": 12, "logprobs": 3}
    whole = live.complete(**body)["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in live.events("/v1/completions", **body)[:-1]]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts if part for item in part[field]] == whole[field]
        assert len(whole[field]) == 12
    assert whole["tokens"][1] == "bytes:\\xc3"
    chat = script | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12}
    chat |= {"logprobs": True, "top_logprobs": 2}
    content = live.post("/v1/chat/completions", **chat).json()["choices"][0]["logprobs"]["content"]
    events = live.events("/v1/chat/completions", **chat)[:-1]
    assert [i for e in events for i in (e["choices"][0]["logprobs"] or {"content": []})["content"]] == content
    assert [entry["bytes"] for entry in content] == [[byte] for byte in ids("héllo wörld")[:12]]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 12


def test_stop_strings_wait_for_min_tokens_and_may_be_kept(live):
    body = scripted("a.b.c.d.") | {"prompt": "x", "max_tokens": 50, "stop": "."}
    assert live.complete(**body)["choices"][0]["text"] == "a"
    assert live.complete(**body, include_stop_str_in_output=True)["choices"][0]["text"] == "a."
    later = live.complete(**body, min_tokens=4)
    assert (later["choices"][0]["text"], later["usage"]["completion_tokens"]) == ("a.b.c", 6)


def test_special_tokens_are_left_out_unless_asked_for(live):
    salt = json.dumps({"reply": [END, *ids("a")]})
    body = {"prompt": "x", "max_tokens": 2, "cache_salt": salt}
    assert live.complete(**body)["choices"][0]["text"] == "a"
    assert live.complete(**body, skip_special_tokens=False)["choices"][0]["text"] == "<e>a"


@pytest.mark.parametrize("prompt", ["héy", ids("héy")])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_holds_the_prompt_and_its_scores(live, prompt, max_tokens):
    # Found in other servers: echo dropped, one token sampled at max_tokens 0, or offsets short by the prompt.
    body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    answer = live.complete(**body)
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "héy" + "hé"[:max_tokens] if max_tokens < 3 else "héyhé"
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"
    assert [len(values) for values in logprobs.values()] == [4 + max_tokens] * 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(value == -0.25 for value in logprobs["token_logprobs"][1:])
    assert logprobs["tokens"][:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert logprobs["text_offset"][:5] == [0, 1, 1, 2, 3][: 4 + max_tokens]
    events = live.events("/v1/completions", **body)[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    for field, values in logprobs.items():
        streamed = [event["choices"][0]["logprobs"] for event in events]
        assert [item for part in streamed for item in part[field]] == values


def test_an_echo_without_scores_and_with_choices(live):
    answer = live.complete(prompt=["ab", "cd"], n=2, max_tokens=2, echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["abab", "abab", "cdcd", "cdcd"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_prompt_scores_come_as_a_table(live):
    for post in (
        lambda **more: live.complete(prompt="abcd", **more),
        lambda **more: live.chat("abcd", **more),
    ):
        choice = post(max_tokens=1, prompt_logprobs=2, return_token_ids=True)["choices"][0]
        table = choice["prompt_logprobs"]
        assert len(table) == len(choice["prompt_token_ids"])
        assert table[0] is None
        for id, candidates in zip(choice["prompt_token_ids"][1:], table[1:], strict=True):
            assert candidates[str(id)]["logprob"] == -0.25
            assert candidates[str(id)]["rank"] == 1
            assert len(candidates) == 2
        assert "prompt_logprobs" not in post(max_tokens=1)["choices"][0]


def test_impossible_tokens_are_finite_numbers_in_json(live):
    answer = live.post("/v1/completions", prompt="abc", max_tokens=3, logprobs=5)
    tops = json.loads(answer.content, parse_constant=lambda name: pytest.fail(name))["choices"][0]["logprobs"]
    assert min(tops["top_logprobs"][0].values()) == -9999.0


def test_n_choices_each_end_once_and_the_prompt_counts_once(live):
    for _ in range(5):
        body = {"prompt": ["abc", "xy"], "n": 4, "max_tokens": 6, "cache_salt": '{"cached_tokens": 2}'}
        answer = live.complete(**body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(8))
        assert [choice["text"] for choice in answer["choices"]] == ["abcabc"] * 4 + ["xyxyxy"] * 4
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 48
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        texts, reasons = joined(live.events("/v1/completions", **body), lambda choice: choice["text"])
        assert texts == {i: "abcabc" if i < 4 else "xyxyxy" for i in range(8)}
        assert reasons == {i: ["length"] for i in range(8)}


def test_the_context_is_the_limit_of_prompt_and_answer(live):
    context = 128
    for length in (context - 2, context - 1):
        room = context - length
        for max_tokens in (1, 2, 100):
            answer = live.complete(prompt=[65] * length, max_tokens=max_tokens)
            assert answer["usage"]["completion_tokens"] == min(max_tokens, room)
            assert answer["choices"][0]["finish_reason"] == "length"
    for length in (context, context + 1):
        refused = live.post("/v1/completions", prompt=[65] * length, max_tokens=1)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert refused.json()["error"]["param"] == "prompt"


def test_a_refusal_by_the_engine_is_an_error_answer(live):
    refused = live.post("/v1/completions", prompt="refuse me", max_tokens=3)
    assert refused.status_code == 500
    assert refused.json()["error"]["message"] == "refused by the script"
    refused = live.post("/v1/completions", prompt="refuse me", max_tokens=3, stream=True)
    assert refused.status_code == 500
    assert live.complete(prompt="abcd", max_tokens=1)
    assert live.state.live == {}


def test_info_says_what_runs(live):
    info = live.http.get("/v1/info").json()
    assert (info["model"], info["kernels"], info["max_context"], info["restarts"]) == ("fake", None, 128, 0)


def test_the_description_names_every_route_and_its_forms(live):
    document = live.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/tokenize",
        "/v1/score",
        "/v1/rerank",
        "/v1/decisions",
        "/v1/detokenize",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/info",
        "/v1/requests/{request_id}",
        "/v1/sessions/{session_id}",
        "/v1/admin/low-latency",
        "/health",
        "/ready",
        "/metrics",
    }
    schemas = document["components"]["schemas"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert schemas["CompletionRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= set(schemas)
    assert "ErrorBody" in references


def test_the_model_list_and_model_names(live):
    models = live.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["fake"]
    assert models["data"][0]["max_model_len"] == 128
    assert live.http.get("/v1/models/fake").json()["id"] == "fake"
    assert live.http.get("/v1/models/other").status_code == 404
    for name in ("fake", "fake-model"):
        assert live.complete(prompt="a", model=name)
    wrong = live.post("/v1/completions", prompt="a", model="gpt-4")
    assert wrong.status_code == 404
    assert wrong.json()["error"]["code"] == "model_not_found"


def test_the_documentation_names_every_metric_and_field(live):
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    metrics = re.findall(r"^# TYPE (\w+)", live.http.get("/metrics").text, re.MULTILINE)
    assert len(metrics) > 15
    assert [name for name in metrics if name not in text] == []
    fields = {*GenerationFields.__struct_fields__, *ChatRequest.__struct_fields__} - set(Unsupported.__struct_fields__)
    assert [name for name in fields if f"`{name}" not in text and name != "chat_template_kwargs"] == []
