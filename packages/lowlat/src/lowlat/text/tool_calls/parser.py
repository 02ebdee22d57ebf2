"""The part that all formats with marked calls share: content up to a call, the call, and what stands around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from lowlat.text.tool_calls.parts import Content, MalformedError, Part, ToolCall, arguments_text, joined
from lowlat.text.tool_calls.source import Pump, Steps, TextSource, first_of, held_end, literal, spaces


class CallFormat(Protocol):
    """How one family of models writes calls."""

    @property
    def openers(self) -> Sequence[str]:
        """Texts that begin a call."""

    @property
    def before(self) -> Sequence[str]:
        """Markup that may stand before a call, such as the beginning of a list of calls."""

    @property
    def after(self) -> Sequence[str]:
        """Markup that may stand after a call."""

    @property
    def bare(self) -> str:
        """What begins a call without an opener, at the answer's start or after a call; "": nothing does."""

    def read_call(self, source: TextSource, opener: str) -> Steps[tuple[Any, Any]]:
        """Read one call, whose opener is consumed; returns its name and its arguments as parsed JSON.

        Raises:
            MalformedError: as soon as the text cannot be a call.
        """


class ToolCallParser:
    """A reader of content and calls.

    A call is given out when it is whole and calls an offered function with an object of arguments. Anything else that
    looks like one is content, character by character as it was. White space and list markup around calls belong to
    them. With `only_one` the answer is complete after one call.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, only_one: bool = False) -> None:
        self._form = form
        self._names = names
        self._only_one = only_one
        self._parts: list[Part] = []
        self._pump = Pump(self._read)
        self.complete = False

    @property
    def markers(self) -> Sequence[str]:
        return [*self._form.openers, *self._form.before, *self._form.after]

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
        form = self._form
        called = False
        may_be_bare = bool(form.bare)
        while True:
            held = ""
            if may_be_bare:
                source.taken = []
                yield from spaces(source)
                held = "".join(source.taken)
            opener = form.bare if may_be_bare and source.rest.startswith(form.bare) else ""
            if not opener:
                found = yield from self._content(source, held, called)
                if found is None:
                    return
                held, opener = found
            call = yield from self._call(source, opener, held)
            if call is None:
                may_be_bare = False
                continue
            self._parts.append(call)
            called = True
            if self._only_one:
                self.complete = True
                return
            yield from self._after(source)
            may_be_bare = bool(form.bare)

    def _call(self, source: TextSource, opener: str, held: str) -> Steps[ToolCall | None]:
        """One call; None when it is malformed and its text has become content."""
        source.begin_call()
        try:
            if opener != self._form.bare:
                source.take(len(opener))
            name, arguments = yield from self._form.read_call(source, opener)
            if name not in self._names or source.room < 0:
                raise MalformedError
            return ToolCall(name, arguments_text(arguments))
        except MalformedError:
            self._parts.append(Content(held + "".join(source.taken)))
            return None

    def _content(self, source: TextSource, held: str, called: bool) -> Steps[tuple[str, str] | None]:
        """Content up to an opener; returns what is held before it and the opener, or None at the end.

        White space and list markup are held until it is known whether a call follows.
        """
        form = self._form
        markers = [*form.openers, *form.before]
        pieces = [held]
        while True:
            rest = source.rest
            at, opener = first_of(rest, form.openers)
            count = at if at >= 0 else len(rest) - (0 if source.ended else held_end(rest, markers))
            solid = self._solid(rest[:count])
            if solid:
                pieces.append(rest[:solid])
                self._parts.append(Content("".join(pieces)))
                pieces = []
            pieces.append(rest[solid:count])
            source.take(count)
            source.taken = []
            if at >= 0:
                return "".join(pieces), opener
            if source.ended and not source.rest:
                left = "".join(pieces)
                if left and not (called and left.isspace()):
                    self._parts.append(Content(left))
                return None
            yield

    def _solid(self, text: str) -> int:
        """Characters before the white space and list markup at the end of `text`."""
        while True:
            shorter = text.rstrip()
            for marker in self._form.before:
                shorter = shorter.removesuffix(marker)
            if shorter == text:
                return len(text)
            text = shorter

    def _after(self, source: TextSource) -> Steps[None]:
        """White space and markup after a call, also where the end of the answer cut it."""
        while True:
            yield from spaces(source)
            if not (yield from literal(source, self._form.after)):
                break
        if source.ended and any(marker.startswith(source.rest) for marker in self._form.after):
            source.take(len(source.rest))
