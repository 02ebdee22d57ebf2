"""A model that writes tool calls as scripted: a template that knows tools, and a server over it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from server_kit import Live, byte_text_model, live_server

from lowlat.text.tool_calls.formats import AnswerFormats

TEMPLATE = (
    "{% if tools %}<s>tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}<e>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% if m.tool_call_id %}[answers {{ m.tool_call_id }}]{% endif %}<e>{% endfor %}"
    "{% if enable_thinking %}<think on>{% endif %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ANSWERS = [
    ("weather in Paris?", f"Let me look.\n{CALL}"),
    ("both in Paris?", f"{CALL}\n{TIME_CALL}"),
    ("21 degrees", "It is 21 degrees in Paris."),
    ("broken?", '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call> sorry'),
    ("unknown?", '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'),
    ("think of Paris?", f"<think>\nIt may rain.\n</think>\n\nLet me look.\n{CALL}"),
    ("just think?", "<think>Hm.</think>Four."),
    ("hello?", "Hello!"),
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}


@contextlib.contextmanager
def tool_server(
    formats: AnswerFormats | None = None,
    template: str = TEMPLATE,
    answers: list[tuple[str, str]] = ANSWERS,
    **settings: Any,
) -> Iterator[Live]:
    """A server that answers by the last of `answers` whose words are in the prompt, three tokens a step."""
    text = msgspec.structs.replace(
        byte_text_model(template=template), formats=formats or AnswerFormats("hermes", "think")
    )
    script = {"answers": answers, "burst": 3, "step_s": 0.0, "max_context": 20_000}
    with live_server(script, text=text, **settings) as server:
        yield server


def nest(levels: int) -> dict[str, Any]:
    """Objects in objects."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def past_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """A message with a call that was made before."""
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps(arguments)}}],
    }


def tool(name: str = "f", **parameters: Any) -> dict[str, Any]:
    """A function to offer, with this schema."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
