"""Bodies of `POST /v1/messages`, and how they become chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lowlat.server.errors import bad_field
from lowlat.server.requests import (
    IGNORED,
    CacheSalt,
    ChatRequest,
    Message,
    Priority,
    RequestId,
    Seed,
    SessionTtl,
    StopString,
    TemplateKey,
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

MAX_BLOCKS = 65536


class TextBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: Annotated[Any, IGNORED] = None
    citations: Annotated[Any, IGNORED] = None


TextBlocks = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class InputBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One block of a message; which fields it has follows from its `type`."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: CallId | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: str | TextBlocks | None = None
    thinking: str | None = None
    is_error: Annotated[Any, IGNORED] = None
    signature: Annotated[Any, IGNORED] = None
    data: Annotated[Any, IGNORED] = None
    cache_control: Annotated[Any, IGNORED] = None
    citations: Annotated[Any, IGNORED] = None
    caller: Annotated[Any, IGNORED] = None


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], Meta(min_length=1, max_length=MAX_BLOCKS)]


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Annotated[Any, IGNORED] = None
    eager_input_streaming: Annotated[Any, IGNORED] = None


class MessagesToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks, where its template can say so; a budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Annotated[Any, IGNORED] = None


class ChatPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What counting tokens and answering have in common."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_BLOCKS)]
    model: Annotated[str, Meta(max_length=1024)] | None = None
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Annotated[dict[TemplateKey, Any], Meta(max_length=32)] | None = None
    cache_control: Annotated[Any, IGNORED] = None
    output_config: Annotated[Any, no_op()] = None
    mcp_servers: Annotated[Any, no_op([])] = None


class CountTokensRequest(ChatPart, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""


class MessagesRequest(ChatPart, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=32)] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None
    session_id: RequestId | None = None
    session_ttl: SessionTtl | None = None
    speculate: bool | None = None
    metadata: Annotated[Any, IGNORED] = None
    service_tier: Annotated[Any, IGNORED] = None
    inference_geo: Annotated[Any, IGNORED] = None
    container: Annotated[Any, no_op()] = None


NAMES = {"stop": "stop_sequences"}
"""Fields of a chat request, as this API calls them."""


def to_chat(body: MessagesRequest) -> ChatRequest:
    """The chat request that says the same.

    Raises:
        ApiError: 400; a block lacks what its type needs, or stands in a message where it cannot.
    """
    chat = chat_part(body)
    chat.max_completion_tokens = body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    chat.stream, chat.speculate = body.stream, body.speculate
    chat.seed, chat.priority, chat.cache_salt = body.seed, body.priority, body.cache_salt
    chat.request_id, chat.session_id, chat.session_ttl = body.request_id, body.session_id, body.session_ttl
    return chat


def chat_part(body: ChatPart) -> ChatRequest:
    """Messages and tools alone."""
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_text(body.system)))
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        tool_choice=_choice(body.tool_choice),
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if body.tools is not None:
        chat.tools = [
            Tool(
                type="function",
                function=FunctionTool(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in body.tools
        ]
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    return chat


def _choice(choice: MessagesToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise bad_field("tool_choice.name", "is required with type tool")
        return NamedTool(type="function", function=ChosenFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _messages(message: InputMessage, where: str) -> list[Message]:
    """One message of this API: results of calls become messages of their own, in their place."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_turn(message.content, where)]
    found: list[Message] = []
    text: Message | None = None
    for number, block in enumerate(message.content):
        at = f"{where}.content[{number}]"
        if block.type == "text":
            piece = _needed(block.text, f"{at}.text")
            if text is None:
                text = Message(role=message.role, content="")
                found.append(text)
            assert isinstance(text.content, str)
            text.content += piece
        elif block.type == "tool_result" and message.role == "user":
            id = _needed(block.tool_use_id, f"{at}.tool_use_id")
            found.append(Message(role="tool", tool_call_id=id, content=_text(block.content)))
            text = None
        else:
            raise bad_field(f"{at}.type", f"{block.type!r} cannot stand in a message of role {message.role!r}")
    return found


def _turn(blocks: list[InputBlock], where: str) -> Message:
    text, thought = "", ""
    calls: list[PastCall] = []
    for number, block in enumerate(blocks):
        at = f"{where}.content[{number}]"
        if block.type == "text":
            text += _needed(block.text, f"{at}.text")
        elif block.type == "thinking":
            thought += _needed(block.thinking, f"{at}.thinking")
        elif block.type == "tool_use":
            if block.input is None:
                raise bad_field(f"{at}.input", "is required")
            arguments = msgspec.json.encode(block.input).decode()
            function = CalledFunction(name=_needed(block.name, f"{at}.name"), arguments=arguments)
            calls.append(PastCall(id=_needed(block.id, f"{at}.id"), function=function))
        elif block.type != "redacted_thinking":
            raise bad_field(f"{at}.type", f"{block.type!r} cannot stand in a message of role 'assistant'")
    return Message(
        role="assistant",
        content=text or (None if calls else ""),
        reasoning_content=thought or None,
        tool_calls=calls or None,
    )


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise bad_field(where, "is required")
    return value


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)
