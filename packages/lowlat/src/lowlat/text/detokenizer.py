"""Text of a stream of tokens, piece by piece, without ever sending half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from lowlat.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class StreamingDetokenizer:
    """Turns one request's tokens into text as they come.

    Bytes wait until they form whole characters. The pieces of all `push` calls and of the last `finish`, joined,
    equal `tokenizer.decode` of all ids; no piece is ever taken back, and none holds U+FFFD unless the whole text does.
    One object serves one request: two requests never share state.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        shown: Iterable[str] = (),
    ) -> None:
        """`continues`: the text goes on from a prompt, so that a space at its start is kept in every tokenizer.

        `shown`: texts of special tokens that are never left out.

        Raises ValueError when the tokenizer's exact bytes are not known.
        """
        if not tokenizer.can_stream():
            raise ValueError("this tokenizer cannot stream text: its decoder is neither byte-level nor SentencePiece")
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._skipped:
            self._skipped -= {id for text in shown if (id := tokenizer.token_id(text)) is not None}
        self._decoder = _new_utf8_decoder("replace")
        self._strip_next = tokenizer.strips_first_space and not continues

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        return self._clean(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        return self._clean(self._decoder.decode(b"", True))

    def _clean(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text
