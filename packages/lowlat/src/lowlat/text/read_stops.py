"""Reads reasoning and calls out of an answer on its way to the client; stop strings look at content alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowlat.text.stops import StopMatch, StopStrings
from lowlat.text.tool_calls.parts import Content, Part, Reader, joined


class ReadStops:
    """Takes the place of `StopStrings` for answers that have a reader.

    The text it returns is content; `take_parts` has all parts since its last call, that content among them. Reasoning
    and calls never hold a stop string, and content does not join into one across a call.
    """

    def __init__(self, reader: Reader, new_stops: Callable[[], StopStrings]) -> None:
        self._reader = reader
        self._new_stops = new_stops
        self._stops = new_stops()
        self._parts: list[Part] = []

    def push(self, text: str, *, may_stop: bool = True) -> str | StopMatch:
        return self._through(self._reader.push(text), may_stop)

    def finish(self, *, may_stop: bool = True) -> str | StopMatch:
        """What was still held; a stop string may be in it."""
        found = self._through(self._reader.finish(), may_stop)
        return found if isinstance(found, StopMatch) else found + self._flush()

    def take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    def _through(self, parts: Sequence[Part], may_stop: bool) -> str | StopMatch:
        text = ""
        for part in parts:
            if not isinstance(part, Content):
                text += self._flush()
                self._parts.append(part)
                continue
            found = self._stops.push(part.text, may_stop=may_stop)
            released = found.text if isinstance(found, StopMatch) else found
            self._add(released)
            text += released
            if isinstance(found, StopMatch):
                return StopMatch(found.stop, text)
        return StopMatch(None, text) if self._reader.complete else text

    def _flush(self) -> str:
        """Content that waited because it might become a stop string."""
        held = self._stops.finish()
        if held:
            self._stops = self._new_stops()
            self._add(held)
        return held

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))
