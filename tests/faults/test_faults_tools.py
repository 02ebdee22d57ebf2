"""Faults of how answers are read: arguments that vanish in coarse pieces, and tags that a piece's edge cuts."""

from __future__ import annotations

import json

import pytest
from server_kit import byte_tokenizer, ids
from tools_kit import TIME, WEATHER, tool_server

from lowlat.text.output import OutputAssembler
from lowlat.text.tool_calls.formats import AnswerFormats
from lowlat.text.tool_calls.parts import Content, Reasoning, ToolCall, joined

ARGUMENTS = [{"city": 'Zürich "}{" \\ 世', "days": [1, {"a": None}]}, {}]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
    for name, arguments in zip(("weather", "time"), ARGUMENTS, strict=True)
)
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALLS}"
THINK = AnswerFormats("hermes", "think")


@pytest.fixture(scope="module")
def server():
    with tool_server(answers=[("recorded", ANSWER)]) as live:
        yield live


def test_a28_arguments_are_whole_however_coarse_the_pieces_are(server):
    """One recorded answer in steps of few tokens, many, and all at once: streams say what the whole answer says."""
    body = {"messages": [{"role": "user", "content": "recorded"}], "tools": [WEATHER, TIME], "max_tokens": 1000}
    sizes = [*range(1, 16), *range(16, len(ids(ANSWER)), 9), len(ids(ANSWER)) + 1]
    for size in sizes:
        sent = body | {"cache_salt": json.dumps({"burst": size, "max_context": 20_000})}
        calls: list[list[str]] = []
        content = reasons = ""
        for event in server.events("/v1/chat/completions", **sent)[:-1]:
            (choice,) = event["choices"]
            content += choice["delta"].get("content") or ""
            reasons += choice["finish_reason"] or ""
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(calls):
                    calls.append([piece["function"]["name"], ""])
                calls[piece["index"]][1] += piece["function"]["arguments"]
        assert [name for name, _ in calls] == ["weather", "time"], size
        assert [json.loads(arguments) for _, arguments in calls] == ARGUMENTS, size
        assert (content, reasons) == ("I look.", "tool_calls"), size
        if size in (1, 7, sizes[-1]):
            choice = server.post("/v1/chat/completions", **sent).json()["choices"][0]
            whole = [call["function"] for call in choice["message"]["tool_calls"]]
            assert [[call["name"], call["arguments"]] for call in whole] == calls
            assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")


def test_a28_two_pieces_cut_at_every_byte():
    whole = [Reasoning("Hm."), Content("I look.")]
    whole += [
        ToolCall(name, json.dumps(arguments, ensure_ascii=False))
        for name, arguments in zip(("weather", "time"), ARGUMENTS, strict=True)
    ]
    tokens = ids(ANSWER)
    for at in range(len(tokens) + 1):
        reader = THINK.reader(("weather", "time"))
        assembler = OutputAssembler(byte_tokenizer(), reader=reader)
        parts = assembler.push(tokens[:at]).parts + assembler.push(tokens[at:], finish_reason="stop").parts
        assert joined(parts) == whole, at


@pytest.mark.parametrize(
    ("text", "opened"), [("weighing it</think>Answer é.", True), ("<think>weighing it</think>Answer é.", False)]
)
def test_a29_a_tag_cut_at_any_two_bytes_lands_nowhere(text, opened):
    tokens = ids(text)
    for first in range(len(tokens) + 1):
        for second in range(first, len(tokens) + 1):
            assembler = OutputAssembler(byte_tokenizer(), reader=THINK.reader((), opened=opened))
            parts = []
            for piece in (tokens[:first], tokens[first:second], tokens[second:]):
                parts += assembler.push(piece).parts
            parts += assembler.push([], finish_reason="stop").parts
            assert joined(parts) == [Reasoning("weighing it"), Content("Answer é.")], (first, second)


def test_a29_reasoning_waits_no_longer_than_it_may_be_the_tag():
    """What is held is bounded by the tag, so neither the wait nor the work for a piece grows with the answer."""
    text = "a <b> </ th</thin </think " * 300
    reader = THINK.reader((), opened=True)
    sent = ""
    for count, character in enumerate(text, 1):
        sent += "".join(part.text for part in reader.push(character))
        came = text[:count]
        held = max(size for size in range(len("</think>")) if came.endswith("</think>"[:size]))
        assert sent == came[: count - held].rstrip()
    assert joined(reader.push("</think>Yes.")) == [Content("Yes.")]
