"""Bodies of `POST /v1/responses`, and how they become chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lowlat.server.errors import ApiError, bad_field
from lowlat.server.grammar_fields import JsonSchemaFormat, ResponseFormat
from lowlat.server.requests import (
    IGNORED,
    CacheSalt,
    ChatRequest,
    Effort,
    Message,
    Priority,
    RequestId,
    Seed,
    SessionTtl,
    Temperature,
    TemplateKey,
    TopP,
    no_op,
)
from lowlat.server.tool_requests import (
    MAX_TOOLS,
    CalledFunction,
    CallId,
    ChosenFunction,
    FunctionTool,
    NamedTool,
    PastCall,
    Tool,
    ToolChoice,
    ToolName,
)

MAX_ITEMS = 65536


class InputPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    annotations: Annotated[Any, IGNORED] = None
    logprobs: Annotated[Any, IGNORED] = None
    refusal: Annotated[Any, no_op()] = None


Parts = Annotated[list[InputPart], Meta(max_length=MAX_ITEMS)]


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item of `input`; which fields it has follows from its `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: CallId | None = None
    name: ToolName | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: Annotated[Any, IGNORED] = None
    id: Annotated[Any, IGNORED] = None
    status: Annotated[Any, IGNORED] = None
    phase: Annotated[Any, IGNORED] = None
    namespace: Annotated[Any, no_op()] = None


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=64)] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[Any, no_op("medium")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Annotated[Any, IGNORED] = None
    generate_summary: Annotated[Any, IGNORED] = None
    context: Annotated[Any, IGNORED] = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: Annotated[Any, no_op(False)] = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/responses`."""

    input: Annotated[str, Meta(min_length=1)] | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    model: Annotated[str, Meta(max_length=1024)] | None = None
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    seed: Seed | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    session_id: RequestId | None = None
    session_ttl: SessionTtl | None = None
    speculate: bool | None = None
    chat_template_kwargs: Annotated[dict[TemplateKey, Any], Meta(max_length=32)] | None = None

    store: bool | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    """Nothing is stored: true, and any id, is refused."""
    conversation: Annotated[Any, no_op()] = None
    prompt: Annotated[Any, no_op()] = None
    background: Annotated[Any, no_op(False)] = None
    truncation: Annotated[Any, no_op("disabled")] = None
    max_tool_calls: Annotated[Any, no_op()] = None
    top_logprobs: Annotated[Any, no_op(0)] = None
    context_management: Annotated[Any, no_op([])] = None
    include: Annotated[Any, IGNORED] = None
    metadata: Annotated[Any, IGNORED] = None
    user: Annotated[Any, IGNORED] = None
    safety_identifier: Annotated[Any, IGNORED] = None
    service_tier: Annotated[Any, IGNORED] = None
    prompt_cache_key: Annotated[Any, IGNORED] = None
    prompt_cache_retention: Annotated[Any, IGNORED] = None


NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat request, as this API calls them."""


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat request that says the same.

    Raises:
        ApiError: 400; an item lacks what its type needs.
    """
    if body.store:
        raise bad_field("store", "responses are not stored here; send store: false", code="unsupported")
    if body.previous_response_id is not None:
        raise bad_field(
            "previous_response_id",
            "responses are not stored here; send the whole conversation as input",
            code="unsupported",
        )
    messages = [] if not body.instructions else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        _take_items(messages, body.input)
    tools = None
    if body.tools is not None:
        tools = [Tool(type="function", function=_function(tool)) for tool in body.tools]
    choice: ToolChoice | None
    if isinstance(body.tool_choice, ResponsesNamedTool):
        choice = NamedTool(type="function", function=ChosenFunction(name=body.tool_choice.name))
    else:
        choice = body.tool_choice
    return ChatRequest(
        messages=messages,
        model=body.model,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        seed=body.seed,
        priority=body.priority,
        request_id=body.request_id,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        session_ttl=body.session_ttl,
        speculate=body.speculate,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_response_format(body.text.format if body.text is not None else None),
    )


def _response_format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema is None:
        raise bad_field("text.format.schema", "is required with type json_schema")
    schema = msgspec.Raw(msgspec.json.encode(format.schema))
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name=format.name or "answer", schema=schema))


def _function(tool: ResponsesTool) -> FunctionTool:
    return FunctionTool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _take_items(messages: list[Message], items: list[InputItem]) -> None:
    """Reasoning, text and calls of one turn become one message of the assistant, as templates expect."""
    thought = ""
    turn: Message | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.type == "reasoning":
            thought += _text(item.content)
            turn = None
        elif item.type == "function_call":
            if turn is None:
                turn = Message(role="assistant", reasoning_content=thought or None)
                messages.append(turn)
            turn.tool_calls = [*(turn.tool_calls or []), _past_call(item, where)]
            thought = ""
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise bad_field(f"{where}.{'call_id' if item.call_id is None else 'output'}", "is required")
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
            turn = None
        else:
            if item.role is None or item.content is None:
                raise bad_field(f"{where}.{'role' if item.role is None else 'content'}", "is required")
            message = Message(role=item.role, content=_text(item.content))
            if item.role == "assistant":
                message.reasoning_content, thought = thought or None, ""
            turn = message if item.role == "assistant" else None
            messages.append(message)
    if not messages:
        raise bad_field("input", "holds nothing but reasoning")


def _past_call(item: InputItem, where: str) -> PastCall:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise bad_field(f"{where}.{name}", "is required")
    assert item.call_id is not None
    assert item.name is not None
    assert item.arguments is not None
    return PastCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))


def _text(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """An error about a chat request, in the words of the API that the client used."""
    param = error.detail.param
    head = next((name for name in names if param is not None and (param == name or param.startswith(name + "["))), None)
    if head is not None and param is not None:
        error.detail.param = names[head] + ("" if head == "messages" else param[len(head) :])
        error.detail.message = error.detail.message.replace(param, error.detail.param, 1)
    return error
