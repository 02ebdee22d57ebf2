"""From the engine's bursts of tokens to what a client is sent: text, ids and logprobs that end at the same token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from lowlat.text.detokenizer import StreamingDetokenizer
from lowlat.text.read_stops import ReadStops
from lowlat.text.stops import StopMatch, StopStrings
from lowlat.text.tokenizer import Tokenizer
from lowlat.text.tool_calls.parts import Part, Reader

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class LogprobEntry(Protocol):
    """What the engine says about one token: its log-probability and the most likely tokens, best first."""

    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...


class TopLogprob(msgspec.Struct, frozen=True):
    """One likely token: id, log-probability (finite), text as `Tokenizer.token_text` gives it, and exact bytes."""

    token_id: int
    logprob: float
    text: str
    bytes: bytes


class TokenLogprob(msgspec.Struct, frozen=True):
    """One output token. `offset`: where its first character starts in the answer's text, in characters."""

    token_id: int
    logprob: float
    text: str
    bytes: bytes
    offset: int
    top: list[TopLogprob]


class Delta(msgspec.Struct):
    """What one burst adds to an answer. Joined over all deltas, every field equals the answer sent whole.

    `token_ids` and `logprobs` come with the burst that brought them, also while their text is still held back.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    """One entry for each of `token_ids`, or None when logprobs were not asked for."""
    completion_tokens: int
    """Tokens of the answer so far, these included."""
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token's id that ended the answer."""
    parts: list[Part] | None = None
    """With a reader: reasoning, content and calls of this burst in order; `text` is the content among them."""


class OutputAssembler:
    """Makes one request's answer from the bursts of its tokens.

    Text, ids, logprobs and the token count all end at the token that completed a stop string: later tokens of a
    burst (accepted drafts, steps launched ahead) are dropped, and so is every later burst.

    `min_tokens`: a stop string counts only when it is completed by token number `min_tokens` + 1 or later, the same
    rule that a sampler follows when it forbids stop tokens for the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        logprobs: bool = False,
        skip_special_tokens: bool = True,
        text_offset: int = 0,
        continues: bool = False,
        reader: Reader | None = None,
    ) -> None:
        """`reader`: tells reasoning and tool calls from content; control tokens that it looks for reach it.

        `continues`: the answer goes on from a raw prompt (completions), so a space at its start belongs to it.

        `text_offset`: characters already sent before the answer (an echoed prompt); token offsets count from it.

        Raises ValueError for an empty stop string or a tokenizer that cannot stream.
        """
        self._tokenizer = tokenizer
        self._detokenizer = StreamingDetokenizer(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            continues=continues,
            shown=() if reader is None else reader.markers,
        )
        self._read = None if reader is None else ReadStops(reader, lambda: StopStrings(stop, include_stop=include_stop))
        self._stops = self._read or StopStrings(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._logprobs = logprobs
        self._characters = text_offset
        self._count = 0
        self.finished = False

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._count

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobEntry] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | None = None,
    ) -> Delta:
        """Adds one burst.

        Args:
            token_ids: tokens of the burst, in order; may be empty with a finish reason (abort).
            logprobs: one entry a token; needed when logprobs were asked for.
            finish_reason: why the engine ended the request with the last of these tokens, or None.
            stop_reason: the stop token's id when it was one that ended it.

        Returns:
            the delta. With `finish_reason` "stop" and a `stop_reason` string while the engine has not finished, the
            caller should abort the request in the engine.

        Raises:
            ValueError: after the end, or without one logprob entry a token.
        """
        if self.finished:
            raise ValueError("this answer has ended; later tokens of the request are to be dropped")
        if self._logprobs and (logprobs is None or len(logprobs) != len(token_ids)):
            raise ValueError(f"{len(token_ids)} tokens need as many logprob entries")
        pieces: list[str] = []
        entries: list[TokenLogprob] | None = [] if self._logprobs else None
        for n, token_id in enumerate(token_ids):
            if entries is not None and logprobs is not None:
                entries.append(self._entry(token_id, logprobs[n]))
            self._count += 1
            text = self._detokenizer.push(token_id)
            if not text:
                continue
            self._characters += len(text)
            found = self._stops.push(text, may_stop=self._count > self._min_tokens)
            if isinstance(found, StopMatch):
                pieces.append(found.text)
                return self._end("".join(pieces), list(token_ids[: n + 1]), entries, "stop", found.stop)
            pieces.append(found)
        if finish_reason is None:
            return Delta("".join(pieces), list(token_ids), entries, self._count, parts=self._parts())
        found = self._stops.push(self._detokenizer.finish(), may_stop=self._count > self._min_tokens)
        if not isinstance(found, StopMatch):
            pieces.append(found)
            found = self._stops.finish()
        if isinstance(found, StopMatch):
            pieces.append(found.text)
            return self._end("".join(pieces), list(token_ids), entries, "stop", found.stop)
        pieces.append(found)
        return self._end("".join(pieces), list(token_ids), entries, finish_reason, stop_reason)

    def _end(
        self,
        text: str,
        token_ids: list[int],
        entries: list[TokenLogprob] | None,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> Delta:
        self.finished = True
        return Delta(text, token_ids, entries, self._count, True, str(finish_reason), stop_reason, self._parts())

    def _parts(self) -> list[Part] | None:
        return None if self._read is None else self._read.take_parts()

    def _entry(self, token_id: int, entry: LogprobEntry) -> TokenLogprob:
        name, data = self._tokenizer.token_text, self._tokenizer.token_bytes
        top = [
            TopLogprob(i, finite_logprob(value), name(i), data(i))
            for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        own = finite_logprob(entry.logprob)
        return TokenLogprob(token_id, own, name(token_id), data(token_id), self._characters, top)


def finite_logprob(value: float) -> float:
    """The log-probability with minus infinity (and anything lower, or not a number) as `LOWEST_LOGPROB`."""
    return value if math.isfinite(value) and value > LOWEST_LOGPROB else LOWEST_LOGPROB
