"""Required calls of a tiny random model in a real engine: whatever it chooses, calls parse and fit their schemas."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import openai
import pytest
from server_kit import Live
from test_server_grammars import serve
from tools_kit import TEMPLATE

from grammar_kit import byte_level, save_tiny
from lowlat.server.text_model import load_text_model
from lowlat.text.tool_calls.formats import TOOL_PARSERS, AnswerFormats
from lowlat.text.tool_calls.grammars import ONE_CALL_ONLY

pytest.importorskip("xgrammar")

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["city", "days"],
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
QUESTION = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tools"), byte_level())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Live]:
    yield from serve(folder)


def test_parsers_are_chosen_by_the_template_or_by_name(folder: Path) -> None:
    assert load_text_model(str(folder)).formats == AnswerFormats("hermes", None)
    named = load_text_model(str(folder), tool_parser="llama3", reasoning_parser="think")
    assert named.formats == AnswerFormats("llama3", "think")
    with pytest.raises(ValueError, match="cannot read the same answer"):
        load_text_model(str(folder), tool_parser="llama3", reasoning_parser="muse")


def speak(server: Live, formats: AnswerFormats) -> None:
    """Have the server take its model for one of another family."""

    def change() -> None:
        assert server.state._text is not None
        text = msgspec.structs.replace(server.state._text.result(), formats=formats)
        server.state._text = server.loop.create_future()
        server.state._text.set_result(text)

    server.on_loop(change)


def check(name: str, arguments: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_required_calls_of_every_form_fit_their_schemas(tiny: Live, form: str) -> None:
    speak(tiny, AnswerFormats(form))
    body = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 700, "n": 2, "parallel_tool_calls": False}
    reply = tiny.post("/v1/chat/completions", **body, tool_choice="required", seed=3)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] == "tool_calls", choice
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        check(call["function"]["name"], call["function"]["arguments"])
    named = {"type": "function", "function": {"name": "now"}}
    reply = tiny.post("/v1/chat/completions", **body, tool_choice=named, seed=4).json()
    for choice in reply["choices"]:
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]


def test_a_stream_has_the_calls_of_the_whole_answer(tiny: Live) -> None:
    speak(tiny, AnswerFormats("hermes"))
    client = openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=120)
    sent: dict[str, Any] = {
        "model": "fake",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 700,
        "seed": 5,
        "parallel_tool_calls": False,
    }
    whole = client.chat.completions.create(**sent).choices[0].message
    with client.chat.completions.stream(**sent) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.tool_calls is not None
    assert streamed.tool_calls is not None
    assert [call.function.arguments for call in streamed.tool_calls] == [
        call.function.arguments for call in whole.tool_calls
    ]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(
        model="fake",
        input="go",
        tools=flat,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=700,
        extra_body={"seed": 5},
    )
    (item,) = [item for item in answer.output if item.type == "function_call"]
    check(item.name, item.arguments)


def test_several_calls_in_one_answer(tiny: Live) -> None:
    """Forms with more than one call an answer: all of them fit, also where a limit cuts the last one."""
    counts = set()
    for form, seed in itertools.product(("hermes", "deepseek_v41", "muse"), (4, 6)):
        assert form not in ONE_CALL_ONLY
        speak(tiny, AnswerFormats(form))
        reply = tiny.post(
            "/v1/chat/completions", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=300, seed=seed
        ).json()
        calls = reply["choices"][0]["message"].get("tool_calls", [])
        for call in calls:
            check(call["function"]["name"], call["function"]["arguments"])
        counts.add(len(calls))
    assert max(counts) > 1, counts
