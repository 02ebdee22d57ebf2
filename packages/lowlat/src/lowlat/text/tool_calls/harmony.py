"""gpt-oss (harmony): channels `analysis`, `commentary` and `final`; a message to `functions.NAME` is a call.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>
"""

from __future__ import annotations

import re
from typing import Any

from lowlat.text.tool_calls.channels import Kind
from lowlat.text.tool_calls.parts import MalformedError, parse_json

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


class Harmony:
    ends = ("<|end|>", "<|call|>", "<|return|>")
    beginnings = ("<|channel|>", "to=", "<|message|>")

    def kind(self, header: str) -> Kind:
        """Commentary without a recipient is what the model tells the user before it calls, so it is content."""
        if _RECIPIENT.search(header):
            return "call"
        channel = _CHANNEL.search(header)
        return "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def read_calls(self, header: str, body: str) -> list[tuple[Any, Any]]:
        recipient = _RECIPIENT.search(header)
        if recipient is None or not recipient[1].startswith("functions."):
            raise MalformedError
        return [(recipient[1].removeprefix("functions."), parse_json(body))]
