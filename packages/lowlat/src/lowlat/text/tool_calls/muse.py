"""Muse: messages by recipient; `self` is reasoning, `user` and `commentary` content, any other a tool.

 to=self<|message|>reasoning<|eom|>
<|start|>assistant to=functions.NAME<|message|><atem:function_calls>
<atem:invoke name="NAME">
<atem:parameter name="KEY">JSON, or text as it is</atem:parameter>
</atem:invoke>
</atem:function_calls><|eom|>
<|start|>assistant to=user<|message|>content<|eot|>
"""

from __future__ import annotations

import re
from typing import Any

from lowlat.text.tool_calls.channels import Kind
from lowlat.text.tool_calls.parts import MalformedError, parse_json
from lowlat.text.tool_calls.source import held_end

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_INVOKE = re.compile(r'\s*<atem:invoke\b[^>]*?\bname="([^"]+)"[^>]*>(.*?)</atem:invoke>\s*', re.DOTALL)
_PARAMETER = re.compile(r'\s*<atem:parameter\b[^>]*?\bname="([^"]+)"[^>]*>(.*?)</atem:parameter>\s*', re.DOTALL)
_OPEN, _CLOSE = "<atem:function_calls>", "</atem:function_calls>"


class Muse:
    ends = ("<|eom|>", "<|eot|>")
    beginnings = ("to=",)

    def kind(self, header: str) -> Kind:
        found = _RECIPIENT.search(header)
        recipient = found[1] if found is not None else "user"
        if recipient == "self":
            return "reasoning"
        return "content" if recipient in ("user", "commentary") else "call"

    def read_calls(self, header: str, body: str) -> list[tuple[Any, Any]]:
        text = body.strip()
        text = text.removeprefix(_OPEN)
        # The answer's end may have cut the closing tag.
        text = text.removesuffix(_CLOSE) if text.endswith(_CLOSE) else text[: len(text) - held_end(text, (_CLOSE,))]
        calls = [(_plain_name(name), _parameters(inside)) for name, inside in _all(_INVOKE, text)]
        if not calls:
            raise MalformedError
        return calls


def _all(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Every match, one directly after the other; raises MalformedError for anything else in the text."""
    found: list[tuple[str, str]] = []
    text = text.strip()
    at = 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise MalformedError
        found.append((match[1], match[2]))
        at = match.end()
    return found


def _parameters(text: str) -> dict[str, Any]:
    """Values that are JSON are taken as JSON, others as text."""
    values: dict[str, Any] = {}
    for key, raw in _all(_PARAMETER, text):
        try:
            values[key] = parse_json(raw)
        except MalformedError:
            values[key] = raw
    return values


def _plain_name(name: str) -> str:
    """Without a namespace: `functions.NAME`, or the name doubled, as the template lists functions."""
    head, _, tail = name.partition(".")
    return tail if head in ("functions", tail) else name
