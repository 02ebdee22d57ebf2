"""`/v1/messages` with the official client: blocks, events, a loop with a tool, counting, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import Live, live_server
from tools_kit import ANSWERS, TEMPLATE, WEATHER

from lowlat.server.messages_requests import InputBlock, MessagesRequest, MessagesTool

anthropic = pytest.importorskip("anthropic")
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture(scope="module")
def client(server: Live) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(client: Any, content: Any, **more: Any) -> Any:
    return client.messages.create(model="fake", max_tokens=500, messages=[{"role": "user", "content": content}], **more)


def test_text_has_usage_and_a_reason(client: Any) -> None:
    answer = ask(client, "hello?", system="Be brief.")
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Hello!"
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "fake")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len("Hello!") + 1
    assert answer.usage.cache_read_input_tokens == 0
    cut = client.messages.create(model="fake", max_tokens=3, messages=[{"role": "user", "content": "hello?"}])
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hel")
    stopped = ask(client, "hello?", stop_sequences=["lo"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "lo", "Hel")


def test_cached_tokens_are_counted_apart() -> None:
    script = {"answers": ANSWERS, "step_s": 0.0, "max_context": 20_000, "cached_tokens": 4}
    with live_server(script) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        usage = ask(client, "hello?").usage
        assert usage.cache_read_input_tokens == 4
        counted = client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "hello?"}])
        assert usage.input_tokens + 4 == counted.input_tokens


def test_a_loop_of_two_turns(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "think of Paris?"}]
    sent: dict[str, Any] = {"model": "fake", "max_tokens": 500, "tools": [TOOL]}
    first = client.messages.create(**sent, messages=messages)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "It may rain."
    assert first.content[1].text == "Let me look."
    call = first.content[2]
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
    second = client.messages.create(**sent, messages=messages)
    assert second.content[0].text == "It is 21 degrees in Paris."


def test_blocks_become_the_messages_that_templates_know(server: Live, client: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "A"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x"}, {"type": "text", "text": "c"}],
        },
    ]
    counted = client.messages.count_tokens(
        model="fake", system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}], messages=messages
    )
    chat = [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "A"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "user", "content": "c"},
    ]
    assert counted.input_tokens == server.post("/v1/tokenize", messages=chat).json()["count"]


def test_a_stream_says_what_the_whole_answer_says(client: Any) -> None:
    sent: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 500,
        "tools": [TOOL],
        "messages": [{"role": "user", "content": "think of Paris?"}],
    }
    whole = client.messages.create(**sent)
    events = list(client.messages.create(**sent, stream=True))
    kinds = [event.type for event in events if event.type not in ("content_block_delta", "ping")]
    blocks = ["content_block_start", "content_block_stop"] * 3
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    with client.messages.stream(**sent) as stream:
        final = stream.get_final_message()
    bare = {"id", "content"}
    assert final.model_dump(exclude=bare) == whole.model_dump(exclude=bare)
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]


def test_thinking_is_switched_by_the_template(server: Live, client: Any) -> None:
    sent = {"model": "fake", "messages": [{"role": "user", "content": "q"}]}
    off = client.messages.count_tokens(**sent, thinking={"type": "disabled"}).input_tokens
    on = client.messages.count_tokens(**sent, thinking={"type": "enabled", "budget_tokens": 1024}).input_tokens
    assert "<think on>" in TEMPLATE
    assert on - off == len("<think on>")


def test_choices_of_tools(client: Any) -> None:
    answer = ask(client, "And both in Paris?", tools=[TOOL, {"name": "time", "input_schema": {"type": "object"}}])
    assert [block.name for block in answer.content] == ["weather", "time"]
    ids = [block.id for block in answer.content]
    assert len(set(ids)) == 2
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(client, "And both in Paris?", tools=[TOOL], tool_choice=one).content) == 1
    none = ask(client, "What is the weather in Paris?", tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


MESSAGE = {"role": "user", "content": "x"}


def blocks(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5}, "messages"),
        ({"messages": [MESSAGE]}, "max_tokens"),
        ({"messages": [], "max_tokens": 5}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}], "max_tokens": 5},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}], "max_tokens": 5},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 5},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [MESSAGE], "max_tokens": 5, "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"messages": [MESSAGE], "max_tokens": 5, "tools": [TOOL], "tool_choice": {"type": "tool"}},
            "tool_choice.name",
        ),
        ({"messages": [MESSAGE], "max_tokens": 5, "tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"messages": [MESSAGE], "max_tokens": 5, "stop_sequences": ["a"] * 33}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "y" * 30_000}], "max_tokens": 5}, "messages"),
        ({"messages": [MESSAGE], "max_tokens": 5, "n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_named(server: Live, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/messages", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    error = answer.json()["error"]
    assert error["param"].replace("[...]", "[0]") == param, error
    assert server.on_loop(lambda: server.state.open_sequences) == 0


def test_keys_come_in_this_apis_header_too() -> None:
    with live_server({"answers": ANSWERS, "step_s": 0.0, "max_context": 20_000}, api_keys=("secret",)) as server:
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            ask(wrong, "hello?")
        right = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
        assert ask(right, "hello?").content[0].text == "Hello!"
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="secret", api_key=None, max_retries=0)
        assert ask(bearer, "hello?").content[0].text == "Hello!"


def test_the_documentation_names_every_field(documented: str) -> None:
    forms = (MessagesRequest, InputBlock, MessagesTool)
    fields = {name for form in forms for name in form.__struct_fields__}
    assert [name for name in sorted(fields) if f"`{name}`" not in documented] == []
