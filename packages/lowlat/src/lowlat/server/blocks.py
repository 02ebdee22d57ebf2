"""An answer as a row of blocks (reasoning, text, calls), as the Responses and the Messages API stream it."""

from __future__ import annotations

from typing import Protocol

from lowlat.text.output import Delta
from lowlat.text.tool_calls.parts import Content, Part, Reasoning, ToolCall

TextKind = type[Content] | type[Reasoning]


class BlockWording(Protocol):
    """How one API words what happens to the block number `index`: events, as bytes."""

    def begin(self, index: int, kind: TextKind) -> bytes: ...
    def piece(self, index: int, kind: TextKind, text: str) -> bytes: ...
    def end(self, index: int, kind: TextKind, text: str) -> bytes: ...
    def call(self, index: int, call: ToolCall) -> bytes: ...


class BlockStream:
    """Tells where blocks begin and end while parts come."""

    def __init__(self, wording: BlockWording) -> None:
        self._wording = wording
        self._kind: TextKind | None = None
        """Of the block of text that is open."""
        self._pieces: list[str] = []
        self.count = 0
        """Blocks begun."""

    def push(self, parts: list[Part]) -> bytes:
        out = b""
        for part in parts:
            if isinstance(part, ToolCall):
                out += self.close()
                out += self._wording.call(self.count, part)
                self.count += 1
                continue
            kind = type(part)
            if kind is not self._kind:
                out += self.close()
                out += self._wording.begin(self.count, kind)
                self._kind = kind
                self.count += 1
            self._pieces.append(part.text)
            out += self._wording.piece(self.count - 1, kind, part.text)
        return out

    def close(self) -> bytes:
        """The end of the block of text that is open, if one is."""
        kind, self._kind = self._kind, None
        text, self._pieces = "".join(self._pieces), []
        return b"" if kind is None else self._wording.end(self.count - 1, kind, text)


def parts_of(delta: Delta) -> list[Part]:
    """The parts of a delta, also where nothing but content was expected."""
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []
