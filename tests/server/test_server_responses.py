"""`/v1/responses` with the official client: items, events in order, a loop with a tool, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_kit import Live, live_server
from tools_kit import ANSWERS, WEATHER, tool_server

from lowlat.server.responses_requests import InputItem, ResponsesRequest

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"], "strict": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with tool_server() as live:
        yield live


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_text_has_usage_and_settings(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", instructions="Be brief.", input="hello?", temperature=0)
    assert answer.output_text == "Hello!"
    assert (answer.status, answer.object, answer.error, answer.store) == ("completed", "response", None, False)
    assert answer.instructions == "Be brief."
    assert answer.temperature == 0
    assert answer.id.startswith("resp_")
    usage = answer.usage
    assert usage.output_tokens == len("Hello!") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hello?", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "Hel"
    with client.responses.stream(model="fake", input="hello?", max_output_tokens=3) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"


def test_a_loop_of_two_turns(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "think of Paris?"}]
    first = client.responses.create(model="fake", input=items, tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].content[0].text == "It may rain."
    assert first.output_text == "Let me look."
    call = first.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert first.usage.output_tokens_details.reasoning_tokens == len("It may rain.")
    # What came back is sent back as it is.
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
    second = client.responses.create(model="fake", input=items, tools=[TOOL])
    assert second.output_text == "It is 21 degrees in Paris."


def test_the_items_of_a_turn_become_one_message(server: Live) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "dev"}]},
        {"type": "message", "role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "look", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "A"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "B"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": "{}"},
    ]
    server.post("/v1/responses", input=items, instructions="sys", max_output_tokens=1)
    messages = [
        {"role": "system", "content": "sys"},
        {"role": "developer", "content": "dev"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "look",
            "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "A"}'}},
                {"id": "c2", "function": {"name": "weather", "arguments": '{"city": "B"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c3", "function": {"name": "weather", "arguments": "{}"}}]},
    ]
    chat = server.post("/v1/tokenize", messages=messages).json()["count"]
    answer = server.post("/v1/responses", input=items, instructions="sys", max_output_tokens=1)
    assert answer.json()["usage"]["input_tokens"] == chat


def test_events_come_in_order_and_say_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    sent: dict[str, Any] = {"model": "fake", "input": "think of Paris?", "tools": [TOOL]}
    events = list(client.responses.create(**sent, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    squeezed = [kind for n, kind in enumerate(kinds) if not n or kinds[n - 1] != kind]
    text = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    assert squeezed == [
        "response.created",
        "response.in_progress",
        *text,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *ends,
        *text,
        "response.output_text.delta",
        "response.output_text.done",
        *ends,
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1].response
    whole = client.responses.create(**sent)

    def bare(output: list[Any]) -> list[Any]:
        return [item.model_dump(exclude={"id", "call_id"}) for item in output]

    assert bare(final.output) == bare(whole.output)
    assert final.usage == whole.usage
    ids = {event.item.id for event in events if event.type == "response.output_item.added"}
    assert {item.id for item in final.output} == ids
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == "Let me look."


def test_the_client_accumulates_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="And both in Paris?", tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output[0].type == "function_call"
    assert final.output[0].name == "weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({}, "input"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "y" * 30_000}, "input"),
        ({"input": "x", "messages": []}, "messages"),
        ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort"),
    ],
)
def test_what_is_wrong_is_named(server: Live, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/responses", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].replace("[...]", "[0]") == param, error
    assert server.on_loop(lambda: server.state.open_sequences) == 0


def test_keys_queues_and_ids_hold_here_too() -> None:
    script = {"answers": ANSWERS, "step_s": 0.0, "max_context": 20_000}
    with live_server(script, api_keys=("secret",)) as server:
        assert server.post("/v1/responses", input="x").status_code == 401
        keyed = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        answer = keyed.responses.create(model="fake", input="hello?", extra_headers={"X-Request-Id": "mine"})
        assert answer.id == "resp_mine"
        assert answer.output_text == "Hello!"
        with pytest.raises(openai.NotFoundError):
            keyed.responses.create(model="other", input="hello?")


def test_an_engine_that_fails_ends_a_stream_with_an_event_and_an_answer_with_a_500() -> None:
    with tool_server(template="{{ messages[0].content }}") as server:
        events = []
        with server.http.stream("POST", "/v1/responses", json={"input": "refuse me", "stream": True}) as answer:
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["message"] == "refused by the script"
        assert server.post("/v1/responses", input="refuse me").status_code == 500
        body = {"messages": [{"role": "user", "content": "refuse me"}], "max_tokens": 5}
        for stream in (False, True):
            answer = server.post("/v1/messages", **body, stream=stream)
            assert (answer.status_code, answer.json()["type"]) == (500, "error")
        assert server.on_loop(lambda: server.state.open_sequences) == 0


def test_the_documentation_names_every_field(documented: str) -> None:
    fields = {*ResponsesRequest.__struct_fields__, *InputItem.__struct_fields__}
    assert [name for name in sorted(fields) if f"`{name}`" not in documented] == []
