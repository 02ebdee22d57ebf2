"""Llama 3: `{"name": ..., "parameters": {...}}` as the whole answer, `<|python_tag|>` before it or not, `;` between."""

from __future__ import annotations

from typing import Any

from lowlat.text.tool_calls.hermes import named_call
from lowlat.text.tool_calls.parts import parse_json
from lowlat.text.tool_calls.source import Steps, TextSource, json_value, spaces


class Llama3:
    """Without its tag a call counts only at the answer's start: an answer may hold JSON."""

    openers = ("<|python_tag|>",)
    before = ()
    after = (";",)
    bare = "{"

    def read_call(self, source: TextSource, opener: str) -> Steps[tuple[Any, Any]]:
        yield from spaces(source)
        return named_call(parse_json((yield from json_value(source))))
