"""DeepSeek V3.2, V4 and V4.1: tags with the word `｜DSML｜` in them, one parameter a tag.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">text as it is</｜DSML｜parameter>
<｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>

V3.2 calls the list `function_calls`; V4.1 writes ` calls`, ` invoke` and ` parameter`, each with a space before it. A
call may also hold one JSON object in the place of parameters.
"""

from __future__ import annotations

from typing import Any

from lowlat.text.tool_calls.parts import MalformedError, parse_json
from lowlat.text.tool_calls.source import Steps, TextSource, expect, json_value, literal, spaces, until

MAX_NAME = 256
WORD = "｜DSML｜"


class Dsml:
    bare = ""

    def __init__(self, calls: str, invoke: str = "invoke", parameter: str = "parameter") -> None:
        """Names of the three tags."""
        self.openers = (f'<{WORD}{invoke} name="',)
        self.before = (f"<{WORD}{calls}>",)
        self.after = (f"</{WORD}{calls}>",)
        self._close = f"</{WORD}{invoke}>"
        self._parameter = f'<{WORD}{parameter} name="'
        self._end = f"</{WORD}{parameter}>"

    def read_call(self, source: TextSource, opener: str) -> Steps[tuple[Any, Any]]:
        name = yield from until(source, '"', MAX_NAME)
        yield from spaces(source)
        if (yield from expect(source, "/>", ">")) == "/>":
            return name, {}
        yield from spaces(source)
        if source.rest.startswith("{"):
            arguments = parse_json((yield from json_value(source)))
            yield from spaces(source)
            yield from expect(source, self._close)
            return name, arguments
        arguments = {}
        while (yield from expect(source, self._parameter, self._close)) == self._parameter:
            key = yield from until(source, '"', MAX_NAME)
            if key in arguments:
                raise MalformedError
            arguments[key] = yield from self._value(source)
            yield from spaces(source)
        return name, arguments

    def _value(self, source: TextSource) -> Steps[Any]:
        yield from spaces(source)
        is_text = yield from literal(source, ('string="true"', 'string="false"'))
        yield from spaces(source)
        yield from expect(source, ">")
        value = yield from until(source, self._end)
        return parse_json(value) if is_text == 'string="false"' else value


def v32() -> Dsml:
    return Dsml("function_calls")


def v4() -> Dsml:
    return Dsml("tool_calls")


def v41() -> Dsml:
    return Dsml(" calls", " invoke", " parameter")
