"""Answers made of messages with a header each: HEADER<|message|>BODY END, then <|start|> and the next header."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

from lowlat.text.tool_calls.parts import Content, MalformedError, Part, Reasoning, ToolCall, arguments_text, joined
from lowlat.text.tool_calls.source import Pump, Steps, TextSource, first_of, held_end, spaces

START, MESSAGE = "<|start|>", "<|message|>"
MAX_HEADER = 1024

Kind = Literal["reasoning", "content", "call"]


class ChannelFormat(Protocol):
    @property
    def ends(self) -> Sequence[str]:
        """Control tokens that end a message."""

    @property
    def beginnings(self) -> Sequence[str]:
        """With what the header of an answer's first message may begin; other text is content without a header."""

    def kind(self, header: str) -> Kind: ...

    def read_calls(self, header: str, body: str) -> list[tuple[Any, Any]]:
        """Names and arguments (parsed JSON) of a message to a tool.

        Raises:
            MalformedError: it holds no call, or none that can be read.
        """


class ChannelReader:
    """Reads reasoning, content and calls out of such messages.

    A message to a tool is read when it has ended; one that cannot be read, or calls a function that was not offered, is
    content as it was, header and all.
    """

    def __init__(
        self, form: ChannelFormat, names: Collection[str], *, only_one: bool = False, split: bool = True
    ) -> None:
        """`names`: functions that may be called. `split`: reasoning is told from content."""
        self._form = form
        self._names = names
        self._split = split
        self._only_one = only_one
        self._parts: list[Part] = []
        self._pump = Pump(self._read)
        self.complete = False

    @property
    def markers(self) -> Sequence[str]:
        return [START, MESSAGE, *self._form.ends, *self._form.beginnings]

    def push(self, text: str) -> list[Part]:
        self._pump.push(text)
        return self._take()

    def finish(self) -> list[Part]:
        self._pump.finish()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    def _read(self, source: TextSource) -> Steps[None]:
        began = True
        while not self.complete:
            source.taken = []
            yield from spaces(source)
            found = yield from self._header(source, self._form.beginnings if began else ())
            began = False
            if found is None:
                raw = "".join(source.taken)
                yield from self._plain(source, raw)
            elif self._form.kind(found) == "call":
                yield from self._tool_message(source, found, "".join(source.taken))
            else:
                yield from self._text_message(source, self._form.kind(found))
            if source.ended and not source.rest:
                return

    def _header(self, source: TextSource, beginnings: Sequence[str]) -> Steps[str | None]:
        """The header of the next message, consumed; None when what comes is no message."""
        options = (START, *beginnings)
        while not source.rest.startswith(options):
            if source.ended or not any(option.startswith(source.rest) for option in options):
                return None
            yield
        while True:
            at = source.rest.find(MESSAGE)
            if at >= 0:
                header = source.take(at)
                source.take(len(MESSAGE))
                return header
            if source.ended or len(source.rest) > MAX_HEADER:
                return None
            yield

    def _plain(self, source: TextSource, raw: str) -> Steps[None]:
        """Text without a header, up to where a message begins; `raw`: white space before it."""
        text = raw + source.take(1)  # it is known not to begin a message
        while source.rest or not source.ended:
            at = source.rest.find(START)
            count = at if at >= 0 else len(source.rest) - (0 if source.ended else held_end(source.rest, (START,)))
            text += source.take(count)
            source.taken = []
            self._parts.append(Content(text))
            if at >= 0:
                return
            text = ""
            if not source.ended:
                yield
        if text.strip():
            self._parts.append(Content(text))

    def _text_message(self, source: TextSource, kind: Kind) -> Steps[None]:
        while True:
            at, end = first_of(source.rest, self._form.ends)
            count = (
                at if at >= 0 else len(source.rest) - (0 if source.ended else held_end(source.rest, self._form.ends))
            )
            text = source.take(count)
            source.taken = []
            if text:
                self._parts.append(Reasoning(text) if kind == "reasoning" and self._split else Content(text))
            if at >= 0:
                source.take(len(end))
                return
            if source.ended:
                return
            yield

    def _tool_message(self, source: TextSource, header: str, raw: str) -> Steps[None]:
        source.begin_call()
        pieces: list[str] = []
        while True:
            at, end = first_of(source.rest, self._form.ends)
            # The answer's end may have cut the control token.
            count = at if at >= 0 else len(source.rest) - held_end(source.rest, self._form.ends)
            pieces.append(source.take(count))
            if at >= 0 or source.ended or source.room < 0:
                source.take(len(source.rest) if source.ended and at < 0 else len(end))
                break
            yield
        calls = self._calls(header, "".join(pieces)) if source.room >= 0 else []
        self._parts += calls or [Content(raw + "".join(source.taken))]

    def _calls(self, header: str, body: str) -> list[ToolCall]:
        """The calls of a message; none when any of them is malformed."""
        try:
            found = self._form.read_calls(header, body)
            if any(name not in self._names for name, _ in found):
                raise MalformedError
            calls = [ToolCall(name, arguments_text(arguments)) for name, arguments in found]
        except MalformedError:
            return []
        if self._only_one and calls:
            self.complete = True
            return calls[:1]
        return calls
