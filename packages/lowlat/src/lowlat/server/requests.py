"""Bodies that clients send: the OpenAI forms, with this server's extensions and limits.

A field that no struct here knows is refused. A field that would change the answer and is not supported yet is listed
in `Unsupported` with the values that ask for nothing; any other value is refused by `decode_body`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lowlat.server.grammar_fields import Choices, Json, ResponseFormat, StructuredOutputs
from lowlat.server.tool_requests import MAX_TOOLS, CallId, PastCall, ToolChoice, Tools


def no_op(*values: Any) -> Meta:
    """A field that is not supported: only null and `values`, which ask for nothing, are accepted."""
    return Meta(
        description="Not supported: only values that change nothing are accepted.",
        extra_json_schema={"enum": [None, *values]},
        # As JSON text: `typing` takes annotations that compare equal for one, and False equals 0.
        extra={"no_op": msgspec.json.encode(values).decode()},
    )


IGNORED = Meta(description="Accepted and ignored: it cannot change the answer.")

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
CacheSalt = Annotated[str, Meta(max_length=256)]
SessionTtl = Annotated[float, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
TemplateKey = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, no_op(False)] = None


class Unsupported(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that are known, would change the answer, and are not supported yet; and those that change nothing."""

    tools: Annotated[Any, no_op([])] = None
    tool_choice: Annotated[Any, no_op("none", "auto")] = None
    functions: Annotated[Any, no_op([])] = None
    function_call: Annotated[Any, no_op("none", "auto")] = None
    best_of: Annotated[Any, no_op(1)] = None
    suffix: Annotated[Any, no_op("")] = None
    modalities: Annotated[Any, no_op(["text"])] = None
    audio: Annotated[Any, no_op()] = None
    prediction: Annotated[Any, no_op()] = None
    reasoning_effort: Annotated[Any, no_op("none")] = None
    verbosity: Annotated[Any, no_op("medium")] = None
    web_search_options: Annotated[Any, no_op()] = None

    user: Annotated[Any, IGNORED] = None
    safety_identifier: Annotated[Any, IGNORED] = None
    metadata: Annotated[Any, IGNORED] = None
    store: Annotated[Any, IGNORED] = None
    service_tier: Annotated[Any, IGNORED] = None
    prompt_cache_key: Annotated[Any, IGNORED] = None
    prompt_cache_retention: Annotated[Any, IGNORED] = None
    parallel_tool_calls: Annotated[Any, IGNORED] = None


class GenerationFields(Unsupported, kw_only=True):
    """What completion and chat requests have in common."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=1024)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json = msgspec.UNSET
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    session_id: RequestId | None = None
    session_ttl: SessionTtl | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Text | Annotated[list[Text | TokenId | TokenIds], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """0 generates nothing: with `echo` and `logprobs`, the prompt is scored."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | None = None
    """Absent only in an assistant's message that has `tool_calls`."""
    name: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    """What the assistant thought; templates that take it show it."""
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None
    refusal: Annotated[Any, no_op()] = None
    function_call: Annotated[Any, no_op()] = None
    audio: Annotated[Any, no_op()] = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Annotated[Any, no_op(False)] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[TemplateKey, Any], Meta(max_length=32)] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    """How long the model should think, where its template can say so."""
