"""Answers of `POST /v1/messages`: the message, its blocks, and the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class MessagesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Prompt tokens that did not come from the cache."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AnswerBlock(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A block of text, thinking or tool_use."""

    type: str
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any = UNSET


class MessagesAnswer(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/messages`, and part of a stream's first event."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class BlockDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; which fields it has follows from its `type`."""

    type: str
    message: MessagesAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET
    error: MessagesError | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int
