"""Reasoning between `<think>` and `</think>` at an answer's start (DeepSeek, Qwen3 and others)."""

from __future__ import annotations

from collections.abc import Sequence

from lowlat.text.tool_calls.parts import Content, Part, Reader, Reasoning
from lowlat.text.tool_calls.source import Pump, Steps, TextSource, held_end, literal, spaces

OPEN, CLOSE = "<think>", "</think>"


class ThinkReader:
    """Splits reasoning from the answer, which `inner` reads further (None: it is content as it is).

    White space around the tags belongs to them. Reasoning that never ends is reasoning to the end of the answer.
    """

    def __init__(self, inner: Reader | None, *, opened: bool) -> None:
        """`opened`: the prompt has opened the tag already."""
        self._inner = inner
        self._opened = opened
        self._parts: list[Part] = []
        self._pump = Pump(self._read)

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    @property
    def markers(self) -> Sequence[str]:
        return [OPEN, CLOSE, *(self._inner.markers if self._inner is not None else ())]

    def push(self, text: str) -> list[Part]:
        self._pump.push(text)
        return self._take()

    def finish(self) -> list[Part]:
        self._pump.finish()
        if self._inner is not None:
            self._parts += self._inner.finish()
        return self._take()

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _answer(self, text: str) -> None:
        if self._inner is not None:
            self._parts += self._inner.push(text)
        elif text:
            self._parts.append(Content(text))

    def _read(self, source: TextSource) -> Steps[None]:
        yield from spaces(source)
        # A template that opened the tag may still be followed by a model that writes it again.
        if (yield from literal(source, (OPEN,))) or self._opened:
            yield from spaces(source)
            yield from self._reasoning(source)
            yield from spaces(source)
        else:
            self._answer("".join(source.taken))
        while True:
            source.taken = []
            self._answer(source.take(len(source.rest)))
            if source.ended:
                return
            yield

    def _reasoning(self, source: TextSource) -> Steps[None]:
        held = ""
        while True:
            rest = source.rest
            at = rest.find(CLOSE)
            count = at if at >= 0 else len(rest) - (0 if source.ended else held_end(rest, (CLOSE,)))
            text = held + source.take(count)
            source.taken = []
            solid = len(text.rstrip())
            if solid:
                self._parts.append(Reasoning(text[:solid]))
            held = text[solid:]
            if at >= 0:
                source.take(len(CLOSE))
                return
            if source.ended:
                return
            yield
