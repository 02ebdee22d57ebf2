"""A chat as clients send it, made into what chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lowlat.server.errors import bad_field
from lowlat.server.requests import Message
from lowlat.server.tool_requests import FunctionTool, OfferedTools, deeper_than
from lowlat.text.chat import ChatTemplate
from lowlat.text.chat_request import Chat
from lowlat.text.tool_calls.parts import MalformedError, arguments_text, parse_json

MAX_DEPTH = 128
"""Levels of a value that goes through a template, whose own code looks into it level by level."""
_RESERVED = ("messages", "tools", "add_generation_prompt", "documents")
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


def chat_of(
    messages: Sequence[Message],
    tools: OfferedTools,
    variables: dict[str, Any] | None,
    add_generation_prompt: bool = True,
) -> Chat:
    """The chat for the template.

    Raises:
        ApiError: 400; see `template_messages`, and variables that have a meaning of their own.
    """
    for name, value in (variables or {}).items():
        if name in _RESERVED or name.endswith("_token"):
            raise bad_field(f"chat_template_kwargs.{name}", "is set by the server")
        if deeper_than(value, MAX_DEPTH):
            raise bad_field(f"chat_template_kwargs.{name}", _TOO_DEEP)
    return Chat(
        messages=template_messages(messages),
        tools=template_tools(tools.functions),
        variables=variables or {},
        add_generation_prompt=add_generation_prompt,
    )


def template_tools(functions: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Functions in the form of the OpenAI API; templates expect parameters even where there are none."""
    found = []
    for function in functions:
        form = msgspec.to_builtins(function)
        form.setdefault("parameters", {"type": "object", "properties": {}})
        found.append({"type": "function", "function": form})
    return found


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with text content; arguments of past calls as objects.

    Raises:
        ApiError: 400; a message lacks what its role needs, or arguments are no JSON object.
    """
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    content = message.content
    if content is None:
        if message.role != "assistant" or not message.tool_calls:
            raise bad_field(f"{where}.content", "is required, but for an assistant's message with tool_calls")
        content = ""
    elif not isinstance(content, str):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        value = getattr(message, field)
        if value and message.role != role:
            raise bad_field(f"{where}.{field}", f"belongs to messages of role {role!r}")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise bad_field(f"{where}.tool_call_id", "is required: the id of the call that this answers")
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{number}]"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(text: str, where: str) -> Any:
    try:
        arguments = parse_json(text) if text.strip() else {}
        arguments_text(arguments)  # nothing that JSON cannot hold
    except MalformedError:
        raise bad_field(f"{where}.function.arguments", "is not the text of a JSON object") from None
    if deeper_than(arguments, MAX_DEPTH):
        raise bad_field(f"{where}.function.arguments", _TOO_DEEP)
    return arguments


def with_effort(chat: Chat, effort: str | None, template: ChatTemplate | None) -> Chat:
    """The chat with the variable by which the model's template takes `reasoning_effort`.

    Raises:
        ApiError: 400; the template has none.
    """
    if effort is None or template is None:
        return chat
    if template.mentions("reasoning_effort"):
        found: dict[str, Any] = {"reasoning_effort": effort}
    elif template.mentions("enable_thinking"):
        found = {"enable_thinking": effort != "none"}
    elif effort == "none":
        return chat
    else:
        raise bad_field("reasoning_effort", "this model's chat template does not take it", code="unsupported")
    return msgspec.structs.replace(chat, variables={**found, **chat.variables})
