"""A whole chat for a template: messages, tools, and whatever else the template takes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from lowlat.text.chat import ChatTemplate, ChatTemplateError
from lowlat.text.tokenizer import Tokenizer


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    """In the OpenAI form with text as content; arguments of past calls as objects."""
    tools: list[dict[str, Any]] = []
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True

    @property
    def has_calls(self) -> bool:
        """Whether there are past calls or answers to them."""
        return any("tool_calls" in message or message["role"] == "tool" for message in self.messages)

    @property
    def size(self) -> int:
        """Characters, roughly."""
        return sum(len(message["content"]) for message in self.messages) + 1024 * len(self.tools)


def encode_chat(template: ChatTemplate, chat: Chat, tokenizer: Tokenizer) -> list[int]:
    """Ids of the chat.

    Most templates want the arguments of past calls as objects, some as text: those are asked a second time.

    Raises:
        ChatTemplateError: the template refuses the chat in both forms.
    """
    messages = chat.messages
    if template.mentions("thinking") and not template.mentions("reasoning_content"):
        messages = [_with_thinking(message) for message in messages]
    try:
        return _encode(template, chat, messages, tokenizer)
    except ChatTemplateError:
        if not any("tool_calls" in message for message in messages):
            raise
        try:
            return _encode(template, chat, [_with_text(message) for message in messages], tokenizer)
        except ChatTemplateError:
            pass
        raise


def _encode(template: ChatTemplate, chat: Chat, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    return template.encode(messages, tokenizer, chat.add_generation_prompt, chat.tools or None, **chat.variables)


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The name that gpt-oss's template has for reasoning; it refuses it beside both content and calls."""
    if "reasoning_content" not in message:
        return message
    thought = {} if message["content"] and "tool_calls" in message else {"thinking": message["reasoning_content"]}
    return {**{key: value for key, value in message.items() if key != "reasoning_content"}, **thought}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
