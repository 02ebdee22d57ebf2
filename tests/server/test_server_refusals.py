"""Every bad request is a 400 (or its own status) that names the field, before the engine hears of it."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import byte_text_model, live_server, refuse

from lowlat.server import bodies
from lowlat.server.bodies import decode_body
from lowlat.server.errors import ApiError
from lowlat.server.requests import ChatRequest, CompletionRequest, Unsupported

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", -math.inf),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", -1),
        ("max_tokens", "3"),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 17),
        ("n", 1.0e300),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", ["a"] * 33),
        ("stop", 5),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("priority", "high"),
        ("request_id", ""),
        ("request_id", "a b"),
        ("request_id", "x" * 129),
        ("cache_salt", 3),
        ("stream_options", {"include_usage": True}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {"5": -101}),
        ("logit_bias", {"5": math.nan}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", [1]),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_p", 1.1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("skip_special_tokens", 1),
        ("tools", [{"type": "function"}]),
        ("echo", 0),
        ("presence_penalty", False),
        ("modalities", ["audio"]),
        ("best_of", 3),
        ("suffix", "end"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("mirostat", 2),
        ("guided_regex", "("),
    ],
)
def test_a_bad_field_of_a_completion_is_named(live, field, value):
    error = refuse(live, "/v1/completions", {"prompt": "hi", field: value})
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([1, 260], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([10**30], "prompt[0]"),
        ([[1], [2, 999]], "prompt[1][1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        (["x"] * 65, "prompt"),
        (["ok", "y" * 128], "prompt[1]"),
    ],
)
def test_a_bad_prompt_is_named(live, prompt, param):
    assert refuse(live, "/v1/completions", {"prompt": prompt})["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": USER, "prompt": "x"}, "prompt"),
        ({"messages": USER, "chat_template_kwargs": {"1": 1}}, "chat_template_kwargs"),
        ({"messages": USER, "echo": True}, "echo"),
        ({"messages": USER, "echo": 0}, "echo"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"messages": USER, "logit_bias": {"260": 1}}, "logit_bias.260"),
        ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": USER, "stop": [""]}, "stop[0]"),
        ({"messages": USER, "stop": ""}, "stop"),
        ({"messages": USER, "stop_token_ids": [260]}, "stop_token_ids[0]"),
        ({"messages": USER, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"messages": [{"role": "user", "content": "y" * 120}]}, "messages"),
        ({"messages": USER, "stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
    ],
)
def test_a_bad_chat_is_named(live, body, param):
    assert refuse(live, "/v1/chat/completions", body)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"prompt": "a",}',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "guided_json": {"const": "\xff"}}',
        b'{"prompt": "a", "user": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800\\u0041"}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"metadata":' + b"[" * 100_000,
        b'{"prompt": "a", "temperature": ' + b"1" * 10_000 + b"}",
    ],
)
def test_what_is_not_json_is_refused(live, body):
    refuse(live, "/v1/completions", body)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_what_is_not_finite_is_refused_by_name(live, field, value):
    answer = live.http.post("/v1/completions", content=b'{"prompt": "a", "%s": %s}' % (field.encode(), value))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    biased = live.http.post("/v1/completions", content=b'{"prompt": "a", "logit_bias": {"7": %s}}' % value)
    assert biased.status_code == 400
    assert biased.json()["error"]["param"].startswith("logit_bias")


def test_harmless_fields_and_values_that_ask_for_nothing_pass(live):
    harmless = {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    no_ops = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": 0,
        "min_p": 0,
        "best_of": 1,
        "suffix": "",
        "echo": False,
    }
    nulls = dict.fromkeys(Unsupported.__struct_fields__)
    for fields in (harmless, no_ops, nulls, {"temperature": None, "stop": None, "n": None, "seed": None}):
        assert live.complete(prompt="a", max_tokens=1, **fields)


def test_a_body_above_the_limit_is_a_413():
    with live_server(max_body_bytes=1000) as live:
        refuse(live, "/v1/completions", {"prompt": "a" * 2000}, 413)
        # Without a length announced, the limit holds while the body arrives.
        answer = live.http.post("/v1/completions", content=(b"a" * 100 for _ in range(50)))
        assert answer.status_code == 413
        assert live.complete(prompt="a", max_tokens=1)


@pytest.mark.parametrize("announced", [True, False])
def test_a_client_that_sends_its_large_body_to_the_end_gets_the_413(announced):
    """A server that closes before has the connection reset, and the answer is lost with it."""
    body, size = b"a" * 2**20, 8
    with live_server(max_body_bytes=1000) as live, live.connect() as raw:
        length = f"Content-Length: {size << 20}" if announced else "Transfer-Encoding: chunked"
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        for _ in range(size):
            raw.sendall(body if announced else b"100000\r\n" + body + b"\r\n")
        if not announced:
            raw.sendall(b"0\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"body_too_large" in answer
        assert live.complete(prompt="a", max_tokens=1)


def test_a_large_body_that_never_ends_or_waits_for_leave_is_a_413(monkeypatch):
    monkeypatch.setattr(bodies, "_DISCARD_S", 0.2)
    for header, leave in (("X-Other: 1", False), ("Expect: 100-continue", True)):
        with live_server(max_body_bytes=1000) as live, live.connect() as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n{header}\r\n\r\n"
            raw.sendall(head.encode() + b"a" * (0 if leave else 2000))
            assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_a_408():
    with live_server(body_timeout_s=0.2) as live, live.connect() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_a_model_without_a_chat_template_refuses_chats():
    with live_server(text=byte_text_model(template=None)) as live:
        error = refuse(live, "/v1/chat/completions", {"messages": USER})
        assert error["code"] == "no_chat_template"
        assert live.complete(prompt="a", max_tokens=1)


def test_a_template_that_refuses_the_messages_is_a_400():
    with live_server(text=byte_text_model(template="{{ raise_exception('roles must alternate') }}")) as live:
        assert "roles must alternate" in refuse(live, "/v1/chat/completions", {"messages": USER})["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "bot", "content": "hi"}]},
            "messages[0].role",
            "'bot' is not one of 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "'image_url' is not one of 'text'",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "regex"}},
            "response_format.type",
            "'regex' is not one of 'json_object', 'json_schema', 'structural_tag', 'text'",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "tool_choice": "any"},
            "tool_choice",
            "'any' is not one of 'auto', 'none', 'required'",
        ),
        ("/v1/responses", {"input": [{"type": "image"}]}, "input[0].type", "'image' is not one of 'function_call', "),
        (
            "/v1/messages",
            {"messages": USER, "max_tokens": 1, "tool_choice": {"type": "all"}},
            "tool_choice.type",
            "'any'",
        ),
        ("/v1/score", {"items": [], "label_token_ids": [1], "mode": "x' is `y"}, "mode", "one of 'auto', 'mis', 'sis'"),
    ],
)
def test_a_word_that_a_field_does_not_know_is_answered_with_those_it_knows(live, path, body, param, message):
    error = refuse(live, path, body)
    assert error["param"] == param
    assert message in error["message"]


def test_refusals_do_not_repeat_long_words(live):
    long = "x" * 100_000
    role = refuse(live, "/v1/chat/completions", {"messages": [{"role": long, "content": "hi"}]})
    assert role["param"] == "messages[0].role"
    assert "'user'" in role["message"]
    field = refuse(live, "/v1/completions", {"prompt": "a", long: 1})
    assert field["code"] == "unknown_field"
    assert max(len(error["message"]) for error in (role, field)) < 200


def test_unknown_paths_and_methods_have_the_error_form(live):
    nothing = live.http.get("/v1/nothing").json()["error"]["message"]
    assert nothing == "there is nothing at /v1/nothing; GET /openapi.json names every route"
    assert "/v1/completions" in live.http.get("/openapi.json").json()["paths"]
    wrong = live.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert "not allowed" in wrong.json()["error"]["message"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


fields = st.sampled_from([*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__])


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(fields, json_values, max_size=6), form=st.sampled_from([CompletionRequest, ChatRequest]))
def test_any_body_is_decoded_or_refused_with_an_api_error(body, form):
    try:
        result = decode_body(json.dumps(body).encode(), form)
    except ApiError as error:
        result = error
    assert isinstance(result, form) or result.status == 400
