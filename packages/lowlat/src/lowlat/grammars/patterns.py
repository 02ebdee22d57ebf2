"""Patterns of JSON strings, written so that the compiler gets them right."""

from __future__ import annotations

import re

from lowlat.grammars.grammar import GrammarError

_ANY = r'[^\x00-\x1f"\\]'
"""A character that stands for itself in a JSON string."""

_PIECES = re.compile(
    r"""(?P<negated>\[\^(?:\\.|[^\]\\])*\])      # may leave out what it likes
      | (?P<escape>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|c[A-Za-z]|.))
      | (?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_CONTROL_ESCAPES = set("nrtfv0")


def length_pattern(least: int, most: int | None) -> str:
    """A pattern for strings of so many characters. The compiler's own lengths let control characters through."""
    return f"^{_ANY}{{{least},{'' if most is None else most}}}$"


def safe_pattern(pattern: str) -> str:
    """The same pattern, in ASCII: beside other characters, the compiler forgets that JSON escapes quotes.

    Raises `GrammarError` for what it gets wrong in any spelling: quotes, backslashes and control characters by name.
    """
    written = []
    for piece in _PIECES.finditer(pattern):
        text = piece[0]
        if not piece["negated"] and _stands_for(text) in {'"', "\\", *map(chr, range(32))}:
            raise GrammarError("quotes, backslashes and control characters in a pattern cannot be enforced")
        written.append("".join(map(_ascii, text)))
    return "".join(written)


def _stands_for(text: str) -> str:
    """The character that a piece of a pattern names; empty for classes like `\\d`."""
    if not text.startswith("\\") or len(text) < 2:
        return text
    kind = text[1]
    if kind in "xu" and len(text) > 2:
        return chr(int(text[2:], 16))
    if kind == "c" or kind in _CONTROL_ESCAPES:
        return "\0"
    return "" if kind.isalnum() else kind


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if character > "\uffff":
        raise GrammarError("characters beyond U+FFFF in a pattern cannot be enforced")
    return f"\\u{ord(character):04x}"
