"""Finds where a JSON object or array that comes in pieces ends, and the first character that breaks its form."""

from __future__ import annotations

import re

MAX_DEPTH = 64
_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALARS = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null")


class JsonScanner:
    """Reads characters one after the other. Line breaks in strings pass, since models write them.

    `complete`: the value has ended; `wrong`: it is none. Cost is linear in the text.
    """

    def __init__(self) -> None:
        self.complete = False
        self.wrong = False
        self._open: list[str] = []
        """Closing brackets that are due, the innermost last."""
        self._next = "value"
        """What may come: value, first (a value or the end of an array), key, first_key, colon, more (comma or end)."""
        self._scalar = ""
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Reads on; returns how many characters belong to the value (or precede the one that breaks it)."""
        at = 0
        while at < len(text) and not self.complete:
            if self._in_string:
                at = self._string(text, at)
                continue
            if self._scalar or (self._next in ("value", "first") and self._open and _starts_scalar(text[at])):
                end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]
                self._scalar += text[at:end]
                at = end
                if at == len(text):
                    # Longer than any number that means something, or cut by the piece's end.
                    self.wrong = len(self._scalar) > 4096
                    break
                if not _SCALARS.fullmatch(self._scalar):
                    self.wrong = True
                    break
                self._scalar, self._next = "", "more"
                continue
            if not self._character(text[at]):
                self.wrong = True
                break
            at += 1
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _STRING.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text):
            self._escaped = text[at] == "\\"
            self._in_string = self._escaped
            at += 1
        return at

    def _character(self, character: str) -> bool:
        """Takes one character outside of strings and scalars; False when it cannot come here."""
        if character in " \t\n\r":
            return True
        place = self._next
        if character == '"':
            self._in_string = True
            if place in ("key", "first_key"):
                self._next = "colon"
            elif place in ("value", "first") and self._open:
                self._next = "more"
            else:
                return False
        elif character in "{[":
            if place not in ("value", "first") or len(self._open) >= MAX_DEPTH:
                return False
            self._open.append("}" if character == "{" else "]")
            self._next = "first_key" if character == "{" else "first"
        elif character in "}]":
            allowed = place == "more" or (place == "first_key" and character == "}") or place == "first"
            if not allowed or not self._open or self._open.pop() != character:
                return False
            self._next = "more"
            self.complete = not self._open
        elif character == ":":
            if place != "colon":
                return False
            self._next = "value"
        elif character == ",":
            if place != "more":
                return False
            self._next = "key" if self._open[-1] == "}" else "value"
        else:
            return False
        return True


def _starts_scalar(character: str) -> bool:
    return character in "-0123456789tfn"
