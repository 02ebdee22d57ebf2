"""Grammars of answers that must be tool calls, as XGrammar structural tags: a format's markup around JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from lowlat.text.tool_calls import deepseek_v3
from lowlat.text.tool_calls.dsml import WORD
from lowlat.text.tool_calls.think import CLOSE, OPEN

Format = dict[str, Any]
"""A format within a structural tag."""

ONE_CALL_ONLY = frozenset({"llama3", "harmony"})
"""Formats in which an answer has one call: the templates know no other, or a call ends the answer."""
_DSML_LIST = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls", "deepseek_v41": " calls"}


class Function(msgspec.Struct, frozen=True):
    """A function that may be called: its name, and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


def calls_grammar(
    form: str, functions: Sequence[Function], *, only_one: bool, reasoning: str | None = None, opened: bool = False
) -> Format:
    """The structural tag of an answer that is one call or (unless `only_one`) more, after reasoning if it has any.

    Args:
        form: one of `TOOL_PARSERS`.
        opened: the prompt ends within reasoning.
    """
    one = only_one or form in ONE_CALL_ONLY
    return {"type": "structural_tag", "format": after_reasoning(_calls(form, functions, one), reasoning, opened)}


def after_reasoning(answer: Format, reasoning: str | None, opened: bool) -> Format:
    """The same format after reasoning, which is free text: the model may think, or must end what the prompt began."""
    if reasoning == "think":
        # White space of JSON alone: a regex's \s has more, such as the byte order mark, and that breaks a JSON answer.
        thought = _sequence(
            _tag("" if opened else OPEN, {"type": "any_text", "excludes": [CLOSE]}, CLOSE), _regex(r"[ \t\r\n]{0,8}")
        )
        return _sequence(thought if opened else _optional(thought), answer)
    if reasoning == "harmony":
        thought = _tag("<|channel|>analysis<|message|>", _free("<|end|>"), "<|end|><|start|>assistant")
        return _sequence(_optional(thought), answer)
    if reasoning == "muse":
        thought = _tag(" to=self<|message|>", _free("<|eom|>"), "<|eom|><|start|>assistant")
        return _sequence(_optional(thought), answer)
    return answer


def format_of(kind: str, text: str) -> Format:
    """A grammar of any kind (see `lowlat.grammars.Grammar`) as a part of a structural tag.

    Raises:
        ValueError: `text` is not the JSON that its kind asks for.
    """
    if kind == "regex":
        return _regex(text)
    if kind == "ebnf":
        return {"type": "grammar", "grammar": text}
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object", "additionalProperties": True}}
    value = json.loads(text)
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    if kind == "choice":
        return {"type": "or", "elements": [_text(option) for option in value]}
    return value["format"]  # type: ignore[no-any-return]


def _calls(form: str, functions: Sequence[Function], one: bool) -> Format:
    if form == "hermes":
        return _list(
            [_tag(f'<tool_call>\n{{"name": "{f.name}", "arguments": ', _json(f), "}\n</tool_call>") for f in functions],
            "\n",
            one,
        )
    if form == "llama3":
        return _list([_tag(f'{{"name": "{f.name}", "parameters": ', _json(f), "}") for f in functions], "; ", one)
    if form in ("deepseek_v3", "deepseek_v31"):
        return _deepseek(form, functions, one)
    if form in _DSML_LIST:
        return _dsml(form, functions, one)
    if form == "harmony":
        head = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
        return _list([_tag(head.format(f.name), _json(f), "<|call|>") for f in functions], "", one)
    assert form == "muse"
    head = ' to=functions.{0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">\n'
    end = "</atem:invoke>\n</atem:function_calls><|eom|>"
    return _list([_tag(head.format(f.name), _muse_parameters(f), end) for f in functions], "<|start|>assistant", one)


def _deepseek(form: str, functions: Sequence[Function], one: bool) -> Format:
    kind, before, after = ("function", "\n```json\n", "\n```") if form == "deepseek_v3" else ("", "", "")
    tags = []
    for f in functions:
        name = f"{kind}{deepseek_v3.SEPARATOR}{f.name}" if kind else f"{f.name}{deepseek_v3.SEPARATOR}"
        tags.append(_tag(f"{deepseek_v3.BEGIN}{name}{before}", _json(f), f"{after}{deepseek_v3.END}"))
    calls = _list(tags, "\n" if kind else "", one)
    return _sequence(_text(deepseek_v3.ALL_BEGIN), calls, _text(deepseek_v3.ALL_END))


def _dsml(form: str, functions: Sequence[Function], one: bool) -> Format:
    space = " " if form == "deepseek_v41" else ""
    style = "deepseek_v4_1_xml" if form == "deepseek_v41" else "deepseek_xml"
    end = f"</{WORD}{space}invoke>\n"
    tags = [
        _tag(f'<{WORD}{space}invoke name="{f.name}">\n', {**_json(f), "style": style}, [end, "\n" + end])
        for f in functions
    ]
    name = _DSML_LIST[form]
    return _sequence(_text(f"<{WORD}{name}>\n"), _list(tags, "", one), _text(f"</{WORD}{name}>"))


def _muse_parameters(function: Function) -> Format:
    """One tag a property, in the schema's order, each value as JSON; others cannot be written."""
    schema = function.schema
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", [])
    parts: list[Format] = []
    for name, value in schema.get("properties", {}).items():
        inside = {**value, **shared} if isinstance(value, dict) else value
        tag = _tag(
            f'<atem:parameter name="{name}">', {"type": "json_schema", "json_schema": inside}, "</atem:parameter>\n"
        )
        parts.append(tag if name in required else _optional(tag))
    return _sequence(*parts) if parts else _text("")


def _json(function: Function) -> Format:
    # Weak models write white space without end where a grammar lets them.
    return {"type": "json_schema", "json_schema": function.schema, "max_whitespace_cnt": 1}


def _free(end: str) -> Format:
    return {"type": "any_text", "excludes": [end]}


def _tag(begin: str, content: Format, end: str | list[str]) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _optional(content: Format) -> Format:
    return {"type": "or", "elements": [content, _text("")]}


def _list(tags: list[Format], separator: str, one: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": one,
    }
