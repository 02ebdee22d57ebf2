"""DeepSeek V3 and V3.1: calls between control tokens, the arguments in a fenced block (V3) or as they are (V3.1).

V3:   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1: <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
both within <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.
"""

from __future__ import annotations

from typing import Any

from lowlat.text.tool_calls.parts import parse_json
from lowlat.text.tool_calls.source import Steps, TextSource, expect, json_value, spaces, until

MAX_NAME = 256
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FENCE = "```"


class DeepseekV3:
    """Reads both forms: the word `function` in the place of a name tells V3."""

    openers = (BEGIN,)
    before = (ALL_BEGIN,)
    after = (END, ALL_END, FENCE)
    bare = ""

    def read_call(self, source: TextSource, opener: str) -> Steps[tuple[Any, Any]]:
        name = yield from until(source, SEPARATOR, MAX_NAME)
        if name.strip() == "function":
            name = yield from until(source, "\n", MAX_NAME)
            yield from expect(source, FENCE + "json")
        yield from spaces(source)
        return name.strip(), parse_json((yield from json_value(source)))
