"""Wording of `/v1/messages`: blocks whole, and their events while they come."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lowlat.server.blocks import BlockStream, TextKind, parts_of
from lowlat.server.errors import ApiError
from lowlat.server.generation import Generation, join_deltas
from lowlat.server.messages_answers import (
    AnswerBlock,
    BlockDelta,
    MessagesAnswer,
    MessagesError,
    MessagesEvent,
    MessagesUsage,
)
from lowlat.text.output import Delta
from lowlat.text.tool_calls.parts import Content, Part, ToolCall

_encode = msgspec.json.Encoder().encode


def stop_reason(delta: Delta, calls: bool) -> tuple[str | None, str | None]:
    """Why an answer ended, in this API's words, and the stop sequence that ended it."""
    if delta.finish_reason == "length":
        return "max_tokens", None
    if calls and delta.finish_reason == "stop":
        return "tool_use", None
    if isinstance(delta.stop_reason, str):
        return "stop_sequence", delta.stop_reason
    return "end_turn", None


class MessagesWriter:
    """One message. `chunks` and `whole` run its generation."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._id = f"msg_{generation.public_id}"
        self._model = model
        self._calls = False

    async def whole(self) -> AsyncIterator[bytes]:
        """The whole answer, as the only item."""
        last: Delta | None = None
        async for _, delta in self._generation.deltas():
            last = delta if last is None else join_deltas(last, delta)
        assert last is not None
        parts = parts_of(last)
        reason, stop = stop_reason(last, any(isinstance(part, ToolCall) for part in parts))
        yield _encode(self._message([_block(part) for part in parts], reason, stop))

    def _message(
        self, content: list[AnswerBlock], reason: str | None = None, stop: str | None = None
    ) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream. It begins with the first token, when it is known what the cache had."""
        blocks = BlockStream(self)
        begun = False
        try:
            async for _, delta in self._generation.deltas():
                out = b"" if begun else _event("message_start", message=self._message([])) + _event("ping")
                begun = True
                out += blocks.push(parts_of(delta))
                if delta.finished:
                    reason, stop = stop_reason(delta, self._calls)
                    out += blocks.close()
                    out += _event(
                        "message_delta",
                        delta=BlockDelta(stop_reason=reason, stop_sequence=stop),
                        usage=self._usage(),
                    )
                    out += _event("message_stop")
                if out:
                    yield out
        except ApiError as error:
            if not begun:
                raise
            yield _event("error", error=MessagesError("api_error", error.detail.message))

    def begin(self, index: int, kind: TextKind) -> bytes:
        return _event("content_block_start", index=index, content_block=_block(kind("")))

    def piece(self, index: int, kind: TextKind, text: str) -> bytes:
        delta = (
            BlockDelta(type="text_delta", text=text)
            if kind is Content
            else BlockDelta(type="thinking_delta", thinking=text)
        )
        return _event("content_block_delta", index=index, delta=delta)

    def end(self, index: int, kind: TextKind, text: str) -> bytes:
        return _event("content_block_stop", index=index)

    def call(self, index: int, call: ToolCall) -> bytes:
        self._calls = True
        block = _block(ToolCall(call.name, "{}"))
        return (
            _event("content_block_start", index=index, content_block=block)
            + _event(
                "content_block_delta",
                index=index,
                delta=BlockDelta(type="input_json_delta", partial_json=call.arguments),
            )
            + _event("content_block_stop", index=index)
        )


def _block(part: Part) -> AnswerBlock:
    if isinstance(part, ToolCall):
        id = f"toolu_{uuid.uuid4().hex}"
        return AnswerBlock(type="tool_use", id=id, name=part.name, input=msgspec.Raw(part.arguments.encode()))
    if isinstance(part, Content):
        return AnswerBlock(type="text", text=part.text)
    return AnswerBlock(type="thinking", thinking=part.text, signature="")


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + _encode(MessagesEvent(type=type, **fields)) + b"\n\n"
