"""From a vocabulary's token strings to the exact bytes each token stands for."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Literal

DecoderKind = Literal["byte_level", "sentencepiece", "other"]

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Byte-level vocabularies (GPT-2 and its heirs) write a byte as a printable character: bytes that are printable in
    Latin-1 as themselves, the others, in rising order, as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = sorted(set(range(256)) - set(printable))
    return table | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


def decoder_kind(decoder: dict[str, Any] | None) -> DecoderKind:
    """How the `decoder` of a tokenizer.json turns tokens into text."""
    if decoder is None:
        return "other"
    steps = decoder.get("decoders", [decoder])
    names = {step.get("type") for step in steps}
    if "ByteLevel" in names:
        return "byte_level"
    if "ByteFallback" in names or "Metaspace" in names or _SPACE_MARK in json.dumps(decoder, ensure_ascii=False):
        return "sentencepiece"
    return "other"


def strips_first_space(decoder: dict[str, Any] | None) -> bool:
    """Whether a SentencePiece-style decoder drops the space that its encoder put before the text."""
    if decoder is None:
        return False
    for step in decoder.get("decoders", [decoder]):
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def to_bytes(token: str, kind: DecoderKind, added: bool) -> bytes:
    """Bytes of one token string; `added` tokens are written as plain text, outside the vocabulary's alphabet."""
    if kind == "byte_level":
        table = byte_of_character()
        # A token with any other character was added as plain text, whatever else it holds.
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode("utf-8", "replace")
    if kind == "sentencepiece":
        if added:
            return token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")
    raise ValueError(
        "this tokenizer is neither byte-level nor SentencePiece style (its decoder is of another type), "
        "so the exact bytes of its tokens are not known; it can encode, but not stream text"
    )
