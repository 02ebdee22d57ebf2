"""Calls that are required or named: which grammar the engine is given."""

from __future__ import annotations

import msgspec
import pytest
from server_kit import Live, byte_text_model
from tools_kit import TIME, WEATHER, tool

from lowlat.grammars.grammar import Grammar
from lowlat.server.errors import ApiError
from lowlat.server.tool_plan import behind_reasoning, grammar_of, reading_of
from lowlat.server.tool_requests import (
    NamedTool,
    OfferedTools,
    Tool,
    ToolChoice,
    offered_tools,
)
from lowlat.text.tool_calls.formats import AnswerFormats, Reading


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
