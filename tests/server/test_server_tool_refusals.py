"""What is wrong with tools is named; what may be sent is documented."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from server_kit import Live
from tools_kit import TIME, WEATHER, nest, past_call, tool

from lowlat.cli.serve import serve
from lowlat.server.answers import AssistantMessage, ToolCallDelta
from lowlat.server.chat_messages import chat_of
from lowlat.server.requests import Message
from lowlat.server.tool_requests import (
    MAX_TOOL_BYTES,
    FunctionTool,
    OfferedTools,
    PastCall,
    Tool,
    offered_tools,
)
from lowlat.text.tool_calls.formats import REASONING_PARSERS, TOOL_PARSERS

TOOLS = [WEATHER, TIME]
DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}


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
