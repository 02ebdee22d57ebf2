"""Chats with tools for templates of several families: what each of them wants to see."""

from __future__ import annotations

from typing import Any

import pytest

from lowlat.text.chat import ChatTemplate, ChatTemplateError
from lowlat.text.chat_request import Chat, encode_chat
from lowlat.text.tokenizer import Tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
TURN: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}


def rendered(source: str, tokenizer: Tokenizer, **chat: Any) -> str:
    ids = encode_chat(ChatTemplate(source), Chat(**chat), tokenizer)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_arguments_are_objects_and_text_where_a_template_wants_text(smollm2: Tokenizer) -> None:
    head = "{% for m in messages %}{% for c in m.tool_calls %}"
    tail = "{% endfor %}{% endfor %}"
    as_object = head + "{{ c.function.arguments | tojson }}{{ c.function.arguments.a }}" + tail
    assert rendered(as_object, smollm2, messages=[TURN]) == '{"a": "é"}é'
    as_text = head + "{{ '<' + c.function.arguments + '>' }}" + tail
    assert rendered(as_text, smollm2, messages=[TURN]) == '<{"a": "é"}>'
    refusing = "{{ raise_exception('no calls') }}"
    with pytest.raises(ChatTemplateError, match="no calls"):
        rendered(refusing, smollm2, messages=[TURN])


def test_reasoning_has_the_name_that_the_template_knows(smollm2: Tokenizer) -> None:
    old = "{% for m in messages %}[{{ m.thinking }}{{ m.reasoning }}]{{ m.content }}{% endfor %}"
    new = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    assert rendered(old, smollm2, messages=[TURN]) == "[hm]"
    assert rendered(new, smollm2, messages=[TURN]) == "[hm]"
    both = {**TURN, "content": "look"}
    assert rendered(old, smollm2, messages=[both]) == "[]look"
    assert rendered(new, smollm2, messages=[both]) == "[hm]look"


def test_tools_and_variables_reach_the_template(smollm2: Tokenizer) -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% if enable_thinking is false %}off{% endif %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"messages": [], "tools": tools, "variables": {"enable_thinking": False}}
    assert rendered(source, smollm2, **chat) == "foff"
    assert rendered("{% if not tools %}none{% endif %}", smollm2, messages=[]) == "none"
    assert Chat(messages=[TURN]).has_calls
    assert Chat(messages=[{"role": "tool", "content": "x"}]).has_calls
    assert not Chat(messages=[{"role": "user", "content": "x"}]).has_calls
