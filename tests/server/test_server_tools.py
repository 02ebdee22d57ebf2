"""Tool calls and reasoning over HTTP, whole and streamed, with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_kit import Live
from tools_kit import TEMPLATE, TIME, WEATHER, tool_server

from lowlat.text.tool_calls.formats import AnswerFormats

TOOLS = [WEATHER, TIME]


PARIS = {"city": "Paris"}


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def joined_calls(chunks: list[Any]) -> list[dict[str, str]]:
    """Calls of a stream as their pieces make them; every first piece has an id and a name, later ones neither."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.index in calls:
                assert piece.id is None
                assert piece.function.name is None
                calls[piece.index]["arguments"] += piece.function.arguments
            else:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls[piece.index] = {
                    "id": piece.id,
                    "name": piece.function.name,
                    "arguments": piece.function.arguments,
                }
    return list(calls.values())


def test_a_loop_of_two_turns_with_the_official_client(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", PARIS)
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    second = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "It is 21 degrees in Paris."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("question", "calls"), [("What is the weather in Paris?", ["weather"]), ("And both in Paris?", ["weather", "time"])]
)
def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI, question: str, calls: list[str]) -> None:
    sent: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": question}], "tools": TOOLS}
    whole = client.chat.completions.create(**sent).choices[0].message
    chunks = list(client.chat.completions.create(**sent, stream=True))
    found = joined_calls(chunks)
    assert [call["name"] for call in found] == calls
    assert [(call["name"], call["arguments"]) for call in found] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (whole.content or "")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    ids = [call["id"] for call in found] + [call.id for call in whole.tool_calls]
    assert len(set(ids)) == len(ids)


def test_ids_and_usage_of_a_stream_are_those_of_the_whole_answer(server: Live) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": TOOLS,
        "return_token_ids": True,
        "logprobs": True,
    }
    whole = server.post("/v1/chat/completions", **body).json()
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    chunks = [event["choices"][0] for event in events[:-1] if event["choices"]]
    assert [id for chunk in chunks for id in chunk.get("token_ids", [])] == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    scores = [entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert scores == [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == len(whole["choices"][0]["token_ids"])


def test_every_choice_has_its_own_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "And both in Paris?"}], tools=TOOLS, n=3
    )
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(ids) == len(set(ids)) == 6
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


def test_reasoning_is_apart_whole_and_streamed(client: openai.OpenAI) -> None:
    sent: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "think of Paris?"}],
        "tools": TOOLS,
    }
    message = client.chat.completions.create(**sent).choices[0].message
    assert message.reasoning_content == "It may rain."
    assert message.content == "Let me look."
    assert message.tool_calls[0].function.name == "weather"
    chunks = list(client.chat.completions.create(**sent, stream=True))
    thought = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thought) == "It may rain."
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me look."
    assert [call["name"] for call in joined_calls(chunks)] == ["weather"]


def test_reasoning_without_tools_and_cut_reasoning(server: Live) -> None:
    message = server.chat("just think?")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
    cut = server.chat("just think?", max_tokens=9)["choices"][0]
    assert cut["message"] == {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Hm"}
    assert cut["finish_reason"] == "length"
    plain = server.chat("hello?")["choices"][0]["message"]
    assert plain == {"role": "assistant", "content": "Hello!", "refusal": None}


def test_a_template_that_opened_the_tag() -> None:
    with tool_server(template=TEMPLATE + "<think>\n") as live:
        message = live.chat("hello?")["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hello!", None)
    with tool_server(AnswerFormats("hermes", None)) as live:
        assert live.chat("just think?")["choices"][0]["message"]["content"] == "<think>Hm.</think>Four."


def test_calls_that_are_none_are_content(server: Live) -> None:
    for question, text in (
        ("broken?", '<tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call> sorry'),
        ("unknown?", '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'),
    ):
        choice = server.chat(question, tools=TOOLS)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
        body = {"messages": [{"role": "user", "content": question}], "tools": TOOLS}
        events = server.events("/v1/chat/completions", **body)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == text


def test_without_tools_calls_are_not_looked_for(server: Live) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        message = server.chat("What is the weather in Paris?", **more)["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message


def test_one_call_where_calls_in_parallel_are_off(server: Live) -> None:
    whole = server.chat("And both in Paris?", tools=TOOLS)
    body = {"tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True}
    single = server.chat("And both in Paris?", **body)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 2
    (call,) = single["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert single["choices"][0]["finish_reason"] == "tool_calls"
    written = bytes(single["choices"][0]["token_ids"]).decode()
    assert written == '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}'
    assert single["usage"]["completion_tokens"] == len(written) < whole["usage"]["completion_tokens"]


def test_stop_strings_look_at_content_alone(server: Live) -> None:
    choice = server.chat("think of Paris?", tools=TOOLS, stop=["Paris", "rain", "look"])["choices"][0]
    assert choice["message"]["content"] == "Let me "
    assert choice["message"]["reasoning_content"] == "It may rain."
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "look")
    choice = server.chat("And both in Paris?", tools=TOOLS, stop="Paris")["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 2
