"""Answers as the OpenAI API writes them. Streams are encoded from these structs directly: cost counts there."""

from __future__ import annotations

import math

import msgspec
from msgspec import UNSET, UnsetType

from lowlat.server.prompt_part import PromptLogprobs
from lowlat.text.output import TokenLogprob


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(msgspec.Struct, kw_only=True):
    """When things happened, seen from the server. Gaps are those between one token and the next of the same choice."""

    queue_s: float
    """Seconds from arrival to the first step that worked for this request."""
    first_token_s: float | None
    """Seconds from arrival to the first token."""
    total_s: float
    gap_mean_ms: float | None
    gap_p90_ms: float | None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionAnswer(msgspec.Struct, kw_only=True):
    name: str
    arguments: str
    """The text of a JSON object."""


class ToolCallAnswer(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionAnswer


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: the first has id and name, those after it bring its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One chunk of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "lowlat"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]


class Cancelled(msgspec.Struct, kw_only=True):
    """Answer of `DELETE /v1/requests/{id}`."""

    id: str
    object: str = "request.cancelled"
    cancelled: bool
    """Whether the request was running; false when it had ended or never was."""


class SessionEnded(msgspec.Struct, kw_only=True):
    """Answer of `DELETE /v1/sessions/{id}`."""

    id: str
    object: str = "session.ended"
    ended: bool
    """Whether the session was known; false when it had expired, lost its pin or never was."""


def completion_logprobs(entries: list[TokenLogprob] | None) -> CompletionLogprobs | None:
    if entries is None:
        return None
    return CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[None if math.isnan(entry.logprob) else entry.logprob for entry in entries],
        top_logprobs=[None if math.isnan(entry.logprob) else _alternatives(entry) for entry in entries],
        text_offset=[entry.offset for entry in entries],
    )


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by text, best first, and the chosen one, as the OpenAI API has it."""
    found: dict[str, float] = {}
    for top in entry.top:
        found.setdefault(top.text, top.logprob)
    found.setdefault(entry.text, entry.logprob)
    return found


def chat_logprobs(entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                entry.text,
                entry.logprob,
                list(entry.bytes),
                [ChatTopLogprob(top.text, top.logprob, list(top.bytes)) for top in entry.top],
            )
            for entry in entries
        ]
    )
