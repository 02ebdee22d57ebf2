"""Every bad request is a 400 (or its own status) that names the field, before the engine hears of it."""

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import byte_text_model, live_server

from lowlat.engine.request import SamplingParams
from lowlat.grammars.grammar import Grammar
from lowlat.server.bodies import decode_body
from lowlat.server.errors import ApiError
from lowlat.server.grammar_fields import grammar_of
from lowlat.server.plan import GREEDY_BELOW, derived_seed, sampling_params
from lowlat.server.requests import ChatRequest, CompletionRequest, Unsupported

USER = [{"role": "user", "content": "hi"}]


def refuse(live, path, body, status=400):
    before = (live.state.engine.open_requests, live.state.engine.stats.prompt_tokens)
    answer = live.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert (live.state.engine.open_requests, live.state.engine.stats.prompt_tokens) == before
    return error


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= (a"}}, "structured_outputs.grammar"),
    ],
)
def test_a_bad_grammar_is_named(live, fields, param):
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})):
        error = refuse(live, path, {**body, **fields})
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1}}}},
            "json_schema",
            '{"b":1}',
        ),
        ({"structured_outputs": {"json": '{"b":1}'}}, "json_schema", '{"b":1}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "regex", "[a-c]+"),
        ({"structured_outputs": {"choice": ["b", "a"]}}, "choice", '["b","a"]'),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "ebnf", "root ::= a"),
        ({"guided_json": {"b": 1}}, "json_schema", '{"b":1}'),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "root ::= a"}, "ebnf", "root ::= a"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"any_text"}}',
        ),
    ],
)
def test_each_spelling_of_a_grammar_is_the_grammar_it_says(fields, kind, text):
    body = decode_body(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)
    assert grammar_of(body)[1] == Grammar(kind, text)


def test_a_grammar_without_the_library_names_the_cure(live, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refuse(live, "/v1/completions", {"prompt": "a", "guided_regex": "not seen before"})
    assert error["param"] == "guided_regex"
    assert "pip install" in error["message"]


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


def test_small_temperatures_are_greedy_and_edge_filters_have_one_meaning():
    def params(**fields):
        return sampling_params(CompletionRequest(prompt="x", **fields), None, (), 100)

    assert params(temperature=GREEDY_BELOW / 2).temperature == 0
    assert params(temperature=GREEDY_BELOW).temperature == GREEDY_BELOW
    assert params().temperature == 1
    assert (params(top_p=0).top_k, params(top_p=0).top_p) == (1, 1)
    assert params(top_k=-1).top_k == 0
    assert params(top_k=1000).top_k == 100
    assert params(seed=-1).seed == 2**63 - 1


def test_every_sampling_option_reaches_the_engine():
    body = CompletionRequest(
        prompt="x",
        min_tokens=2,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={"7": -100, "9": 5, "007": 3},
        prompt_logprobs=1,
    )
    params = sampling_params(body, 4, (3,), 100, echo=True)
    assert (params.min_tokens, params.min_p, params.repetition_penalty) == (2, 0.1, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (-0.5, 0.25)
    assert dict(params.logit_bias) == {7: 3, 9: 5}
    assert params.prompt_logprobs == 4
    assert sampling_params(body, 4, (3,), 100).prompt_logprobs == 1
    plain = sampling_params(CompletionRequest(prompt="x"), None, (), 100)
    assert plain == SamplingParams(temperature=1.0)


def test_derived_seeds_differ_and_repeat():
    seeds = {derived_seed(7, choice) for choice in range(1, 100)}
    assert len(seeds) == 99
    assert seeds == {derived_seed(7, choice) for choice in range(1, 100)}
    assert all(0 <= seed < 2**63 for seed in seeds)


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
