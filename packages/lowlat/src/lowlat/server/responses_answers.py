"""Answers of `POST /v1/responses`: the response object, its items, and the events of a stream."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str


class MessageItem(msgspec.Struct, kw_only=True):
    type: str = "message"
    id: str
    role: str = "assistant"
    status: str = "completed"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True):
    type: str = "reasoning"
    id: str
    status: str = "completed"
    summary: list[None] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True):
    type: str = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputItem = dict[str, Any]
"""One of the items above, as it is sent: a union of structs without tags cannot be described."""


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/responses`, and part of its first and last events."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: str = "disabled"
    usage: ResponsesUsage | None = None
    metadata: dict[str, str] = {}


class ResponsesEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; which fields it has follows from its `type`."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: Any | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[None] | UnsetType = UNSET


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
