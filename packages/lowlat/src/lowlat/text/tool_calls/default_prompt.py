"""Tools for chat templates that know none: a text in the system message, in the Hermes form, and past calls as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You may call functions to help the user. Each line between <tools> and </tools> is one, as JSON:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments between <tool_call> and </tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system message says of `tools`."""
    return _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """The same chat in messages of role, content and name alone.

    Calls become the assistant's text, and results of one round of calls one user message.
    """
    plain: list[dict[str, Any]] = []
    results = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            plain.append({"role": role, "content": "\n".join([*([content] if content else []), *map(_call, calls)])})
        else:
            plain.append(
                {key: value for key, value in message.items() if key in ("role", "name")} | {"content": content}
            )
        results = role == "tool"
    if tools:
        text = tools_text(tools)
        if plain and plain[0]["role"] in ("system", "developer"):
            plain[0]["content"] += f"\n\n{text}"
        else:
            plain.insert(0, {"role": "system", "content": text})
    return plain


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
