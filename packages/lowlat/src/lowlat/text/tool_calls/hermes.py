"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several one after the other."""

from __future__ import annotations

from typing import Any

from lowlat.text.tool_calls.parts import MalformedError, parse_json
from lowlat.text.tool_calls.source import Steps, TextSource, json_value, spaces


class Hermes:
    """The closing tag may be missing: the call is whole when its JSON is."""

    openers = ("<tool_call>",)
    before = ()
    after = ("</tool_call>",)
    bare = ""

    def read_call(self, source: TextSource, opener: str) -> Steps[tuple[Any, Any]]:
        yield from spaces(source)
        return named_call(parse_json((yield from json_value(source))))


def named_call(call: Any) -> tuple[Any, Any]:
    """Name and arguments out of `{"name": ..., "arguments": {...}}`, as several families write it.

    `parameters` is taken for `arguments`; arguments may be JSON in a string, or missing where there are none.

    Raises:
        MalformedError: not an object with a name.
    """
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedError
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        arguments = {}
    return call["name"], parse_json(arguments) if isinstance(arguments, str) else arguments
