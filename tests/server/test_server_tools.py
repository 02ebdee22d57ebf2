"""Tool calls and reasoning over HTTP: whole and streamed, with the official client, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import openai
import pytest
from server_kit import Live, byte_text_model
from tools_kit import TEMPLATE, TIME, WEATHER, tool_server

from lowlat.cli.serve import serve
from lowlat.grammars.grammar import Grammar
from lowlat.server.answers import AssistantMessage, ToolCallDelta
from lowlat.server.chat_messages import chat_of
from lowlat.server.errors import ApiError
from lowlat.server.requests import Message
from lowlat.server.tool_plan import behind_reasoning, grammar_of, reading_of
from lowlat.server.tool_requests import (
    MAX_TOOL_BYTES,
    FunctionTool,
    NamedTool,
    OfferedTools,
    PastCall,
    Tool,
    ToolChoice,
    offered_tools,
)
from lowlat.text.tool_calls.formats import REASONING_PARSERS, TOOL_PARSERS, AnswerFormats, Reading

TOOLS = [WEATHER, TIME]
PARIS = {"city": "Paris"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with tool_server() as live:
        yield live


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def joined_calls(chunks: list[Any]) -> list[dict[str, str]]:
    """Calls of a stream as their pieces make them; every first piece has an id and a name, later ones neither."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.index in calls:
                assert piece.id is None
                assert piece.function.name is None
                calls[piece.index]["arguments"] += piece.function.arguments
            else:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls[piece.index] = {
                    "id": piece.id,
                    "name": piece.function.name,
                    "arguments": piece.function.arguments,
                }
    return list(calls.values())


def test_a_loop_of_two_turns_with_the_official_client(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", PARIS)
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    second = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 21 degrees in Paris."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("question", "calls"), [("What is the weather in Paris?", ["weather"]), ("And both in Paris?", ["weather", "time"])]
)
def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI, question: str, calls: list[str]) -> None:
    sent: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": question}], "tools": TOOLS}
    whole = client.chat.completions.create(**sent).choices[0].message
    chunks = list(client.chat.completions.create(**sent, stream=True))
    found = joined_calls(chunks)
    assert [call["name"] for call in found] == calls
    assert [(call["name"], call["arguments"]) for call in found] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (whole.content or "")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    ids = [call["id"] for call in found] + [call.id for call in whole.tool_calls]
    assert len(set(ids)) == len(ids)


def test_ids_and_usage_of_a_stream_are_those_of_the_whole_answer(server: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": TOOLS,
        "return_token_ids": True,
        "logprobs": True,
    }
    whole = server.post("/v1/chat/completions", **body).json()
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    chunks = [event["choices"][0] for event in events[:-1] if event["choices"]]
    assert [id for chunk in chunks for id in chunk.get("token_ids", [])] == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    scores = [entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert scores == [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"])


def test_every_choice_has_its_own_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "And both in Paris?"}], tools=TOOLS, n=3
    )
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(ids) == len(set(ids)) == 6
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


def test_reasoning_is_apart_whole_and_streamed(client: openai.OpenAI) -> None:
    sent: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "think of Paris?"}],
        "tools": TOOLS,
    }
    message = client.chat.completions.create(**sent).choices[0].message
    assert message.reasoning_content == "It may rain."
    assert message.content == "Let me look."
    assert message.tool_calls[0].function.name == "weather"
    chunks = list(client.chat.completions.create(**sent, stream=True))
    thought = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thought) == "It may rain."
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me look."
    assert [call["name"] for call in joined_calls(chunks)] == ["weather"]


def test_reasoning_without_tools_and_cut_reasoning(server: Live) -> None:
    message = server.chat("just think?")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
    cut = server.chat("just think?", max_tokens=9)["choices"][0]
    assert cut["message"] == {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Hm"}
    assert cut["finish_reason"] == "length"
    plain = server.chat("hello?")["choices"][0]["message"]
    assert plain == {"role": "assistant", "content": "Hello!", "refusal": None}


def test_a_template_that_opened_the_tag() -> None:
    with tool_server(template=TEMPLATE + "<think>\n") as live:
        message = live.chat("hello?")["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hello!", None)
    with tool_server(AnswerFormats("hermes", None)) as live:
        assert live.chat("just think?")["choices"][0]["message"]["content"] == "<think>Hm.</think>Four."


def test_calls_that_are_none_are_content(server: Live) -> None:
    for question, text in (
        ("broken?", '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call> sorry'),
        ("unknown?", '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'),
    ):
        choice = server.chat(question, tools=TOOLS)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
        body = {"messages": [{"role": "user", "content": question}], "tools": TOOLS}
        events = server.events("/v1/chat/completions", **body)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == text


def test_without_tools_calls_are_not_looked_for(server: Live) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message = server.chat("What is the weather in Paris?", **more)["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message


def test_one_call_where_calls_in_parallel_are_off(server: Live) -> None:
    whole = server.chat("And both in Paris?", tools=TOOLS)
    body = {"tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True}
    single = server.chat("And both in Paris?", **body)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 2
    (call,) = single["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert single["choices"][0]["finish_reason"] == "tool_calls"
    written = bytes(single["choices"][0]["token_ids"]).decode()
    assert written == '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}'
    assert single["usage"]["completion_tokens"] == len(written) < whole["usage"]["completion_tokens"]


def test_stop_strings_look_at_content_alone(server: Live) -> None:
    choice = server.chat("think of Paris?", tools=TOOLS, stop=["Paris", "rain", "look"])["choices"][0]
    assert choice["message"]["content"] == "Let me "
    assert choice["message"]["reasoning_content"] == "It may rain."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "look")
    choice = server.chat("And both in Paris?", tools=TOOLS, stop="Paris")["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 2


def test_the_template_sees_tools_calls_and_answers(server: Live) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"A <e>"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    ids = server.post("/v1/tokenize", **body).json()["tokens"]
    text = server.post("/v1/detokenize", tokens=ids).json()["prompt"]
    tools, _, rest = text.removeprefix("<s>tools\n").partition("<e>")
    assert json.loads(tools) == WEATHER
    assert rest == (
        "<s>user\nq<e><s>assistant\n(hm)"
        '[call weather {"city": "A <e>"}]<e><s>tool\n21[answers c1]<e><think on><s>assistant\n'
    )
    sent = server.post("/v1/chat/completions", **body, max_tokens=1, return_token_ids=True).json()
    assert sent["choices"][0]["prompt_token_ids"] == ids
    # What looked like a control token in the arguments stayed text.
    assert ids.count(258) == 4


def test_a_template_that_knows_no_tools_gets_words(server: Live) -> None:
    plain = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}<s>assistant\n"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}},
                {"id": "c2", "function": {"name": "time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    with tool_server(template=plain) as live:
        ids = live.post("/v1/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
        text = live.post("/v1/detokenize", tokens=ids).json()["prompt"]
        assert text.startswith("<s>system\nBe brief.\n\nYou may call functions")
        assert '"name": "weather", "description": "The weather in a city."' in text
        assert text.endswith(
            "<s>assistant\nI look.\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><e>'
            "<s>user\n<tool_response>\n21 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response><e>"
            "<s>assistant"
        )
        assert live.post("/v1/chat/completions", messages=messages[:2], tools=TOOLS).json()["choices"][0]["message"][
            "tool_calls"
        ]
    with tool_server(AnswerFormats("llama3"), template=plain) as live:
        answer = live.post("/v1/chat/completions", messages=messages, tools=TOOLS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tools_unsupported")


def test_templates_that_want_arguments_as_text_get_them() -> None:
    text = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    with tool_server(template=text + "{{ tools }}") as live:
        call = {"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}
        ids = live.post("/v1/tokenize", messages=[{"role": "assistant", "tool_calls": [call]}]).json()["tokens"]
        assert bytes(ids).decode() == 'call {"a": 1}None'


@pytest.mark.parametrize("thinks", [False, True])
def test_required_and_named_calls_have_a_grammar(thinks: bool) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    weather, time = call.format("weather", '{"city": "x"}'), call.format("time", "{}")
    text = msgspec.structs.replace(byte_text_model(), formats=AnswerFormats("hermes", "think" if thinks else None))
    both = msgspec.convert([WEATHER, TIME], list[Tool])

    def accepted(answer: str, choice: ToolChoice, parallel: bool = True, prompt: bytes = b"q") -> bool:
        tools = offered_tools(both, choice, parallel)
        assert tools.must_call
        reading = reading_of(list(prompt), tools, text)
        assert reading is not None
        grammar = grammar_of(tools, reading)
        assert grammar.kind == "structural_tag"
        return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(grammar.text), answer)

    named = msgspec.convert({"type": "function", "function": {"name": "weather"}}, NamedTool)
    assert accepted(weather, "required")
    assert accepted(f"{weather}\n{time}", "required")
    assert not accepted(f"{weather}\n{time}", "required", parallel=False)
    assert accepted(weather, named)
    assert not accepted(time, named)
    assert accepted(f"<think>hm</think>\n\n{weather}", named) == thinks
    assert accepted(f"hm</think>\n\n{weather}", named, prompt=b"...<think>\n") == thinks
    assert accepted(weather, named, prompt=b"...<think>\n") == (not thinks)


def test_a_grammar_of_the_request_holds_behind_reasoning() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    text = msgspec.structs.replace(byte_text_model(), formats=AnswerFormats("hermes", "think"))
    reading = reading_of(list(b"q"), OfferedTools(), text)
    assert reading is not None
    cases = [
        (Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": 1}', '{"a": "x"}'),
        (Grammar("json_object"), '{"x": [1]}', "[1]"),
        (Grammar("regex", "[ab]+"), "abba", "abc"),
        (Grammar("ebnf", 'root ::= "yes" | "no"'), "yes", "maybe"),
        (Grammar.choice(["red", "blue"]), "blue", "green"),
        (
            Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "regex", "pattern": "x"}}'),
            "x",
            "y",
        ),
    ]
    for grammar, good, bad in cases:
        tag = behind_reasoning(grammar, reading, "f")
        compiled = xgrammar.Grammar.from_structural_tag(tag.text)
        for thought in ("", "<think>\nany { thing\n</think>\n\n"):
            assert _is_grammar_accept_string(compiled, thought + good), grammar
            assert not _is_grammar_accept_string(compiled, thought + bad), grammar
    for broken in (Grammar("structural_tag", "{}"), Grammar("json_schema", "{"), Grammar("json_schema", '{"not": {}}')):
        with pytest.raises(ApiError, match="f: cannot be followed"):
            behind_reasoning(broken, reading, "f")
    for broken in ('{"type": "integer", "const": 1e400}', '{"type": "object", "required": 5}'):
        with pytest.raises(ApiError, match="f: cannot be followed"):
            behind_reasoning(Grammar("json_schema", broken), reading, "f")
    for text in ("[" * 5000 + "]" * 5000, '{"items":' * 990 + "{}" + "}" * 990):
        with pytest.raises(ApiError, match="f: "):
            behind_reasoning(Grammar("json_schema", text), reading, "f")
    channels = Reading(AnswerFormats("harmony", "harmony"))
    with pytest.raises(ApiError, match="harmony"):
        behind_reasoning(Grammar("json_object"), channels, "f")


def test_schemas_that_cannot_be_enforced_are_refused_where_a_call_is_required(server: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hello?"}], "tools": [WEATHER, tool()]}
    body["tools"][1]["function"]["parameters"] = {"properties": {"a": {"not": {}}}}
    assert server.post("/v1/chat/completions", **body).status_code == 200
    for schema in ({"properties": {"a": {"not": {}}}}, {"required": 5}, {"properties": {"a": {"format": {}}}}):
        body["tools"][1]["function"]["parameters"] = schema
        answer = server.post("/v1/chat/completions", **body, tool_choice="required")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools[1].function.parameters"
    named = {"type": "function", "function": {"name": "weather"}}
    both = server.post("/v1/chat/completions", **body, tool_choice=named, response_format={"type": "json_object"})
    assert both.status_code == 400


def nest(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def past_call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}}],
    }


def test_values_as_deep_as_allowed_go_through_a_template(server: Live) -> None:
    messages = [{"role": "user", "content": "q"}, past_call(nest(128))]
    for fields in ({}, {"chat_template_kwargs": {"a": nest(128)}}):
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=3, **fields)
        assert answer.status_code == 200, answer.text


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def past(arguments: str = "{}") -> dict[str, Any]:
    return {"id": "c", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [tool("bad name")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(type="array")]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(properties=[1])]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool(properties={"a": DEEP})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * MAX_TOOL_BYTES)]}, "tools[0].function"),
        ({"tools": [tool(f"f{n}", d="x" * 60_000) for n in range(20)]}, "tools"),
        ({"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"a": nest(129)}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": nest(700)}}, "chat_template_kwargs.a"),
        ({"messages": [past_call(nest(129))]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [past_call(nest(700))]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "c"}]}, "messages[0].reasoning_content"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_wrong_with_tools_is_named(server: Live, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "q"}]} | fields
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").replace("[...]", "[0]") == param, error
    assert server.on_loop(lambda: server.state.open_sequences) == 0


def test_tools_of_completions_are_still_refused(server: Live) -> None:
    answer = server.post("/v1/completions", prompt="a", tools=TOOLS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_offered_tools_settle_the_schema() -> None:
    both = msgspec.convert([TIME, WEATHER], list[Tool])
    tools = offered_tools(both, None, None)
    assert tools.names == ("time", "weather")
    assert tools.callable[0].schema == {"type": "object", "properties": {}}
    assert not tools.must_call
    assert OfferedTools() == offered_tools([], "auto", None) == offered_tools(both, "none", None)


def test_messages_without_text_are_allowed_only_with_calls() -> None:
    message = msgspec.convert({"role": "assistant", "tool_calls": [past()]}, Message)
    assert chat_of([message], OfferedTools(), None).messages[0]["content"] == ""


def test_the_documentation_names_every_field_and_parser(documented: str) -> None:
    forms = (FunctionTool, PastCall, AssistantMessage, ToolCallDelta)
    fields = {name for form in forms for name in form.__struct_fields__} - {"role", "refusal", "function"}
    names = {*fields, *TOOL_PARSERS, *REASONING_PARSERS, "tool_call_id", "tool_choice", "parallel_tool_calls"}
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_the_flags_offer_every_parser() -> None:
    hints = get_type_hints(serve, include_extras=True)
    for flag, names in (
        ("tool_parser", ("auto", *TOOL_PARSERS)),
        ("reasoning_parser", ("auto", "off", *REASONING_PARSERS)),
    ):
        assert set(get_args(get_args(hints[flag])[0])) == set(names)
