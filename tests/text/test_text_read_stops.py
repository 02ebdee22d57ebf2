"""Answers with a reader: stop strings look at content alone, hidden tokens reach it, one call ends the answer."""

from __future__ import annotations

from lowlat.text.output import Delta, OutputAssembler
from lowlat.text.tokenizer import Tokenizer
from lowlat.text.tool_calls.formats import AnswerFormats
from lowlat.text.tool_calls.parts import Content, Part, Reasoning, ToolCall, joined

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP"}}\n</tool_call>'


def assemble(
    tokenizer: Tokenizer,
    text: str,
    *,
    size: int,
    stop: tuple[str, ...] = (),
    only_one: bool = False,
    reason: str = "stop",
) -> tuple[list[Part], Delta, int]:
    """All parts, the last delta, and how many tokens were used."""
    reader = AnswerFormats("hermes", "think").reader(("f",), only_one=only_one)
    assembler = OutputAssembler(tokenizer, stop=stop, reader=reader)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts: list[Part] = []
    content = ""
    for at in range(0, len(ids), size):
        delta = assembler.push(ids[at : at + size], None, reason if at + size >= len(ids) else None)
        parts += delta.parts or []
        content += delta.text
        if delta.finished:
            break
    assert content == "".join(part.text for part in parts if isinstance(part, Content))
    return joined(parts), delta, assembler.completion_tokens


def test_stop_strings_are_looked_for_in_content_alone(smollm2: Tokenizer) -> None:
    text = f"<think>STOP</think>Well. {CALL} After STOP never"
    for size in (1, 3, 1000):
        parts, delta, tokens = assemble(smollm2, text, size=size, stop=("STOP",))
        assert parts == [
            Reasoning("STOP"),
            Content("Well."),
            ToolCall("f", '{"a": "STOP"}'),
            Content("After "),
        ]
        assert (delta.finish_reason, delta.stop_reason) == ("stop", "STOP")
        assert tokens < len(smollm2.encode(text))


def test_content_held_for_a_stop_string_comes_before_the_call(smollm2: Tokenizer) -> None:
    for size in (1, 2, 1000):
        parts, delta, _ = assemble(smollm2, f"ST{CALL}OP", size=size, stop=("STOP",))
        assert parts == [Content("ST"), ToolCall("f", '{"a": "STOP"}'), Content("OP")]
        assert delta.stop_reason is None


def test_a_stop_string_in_text_that_was_held_to_the_end(smollm2: Tokenizer) -> None:
    parts, delta, _ = assemble(smollm2, "a <tool_c", size=1, stop=("tool",), reason="length")
    assert parts == [Content("a <")]
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "tool")


def test_with_one_call_allowed_the_answer_ends_with_the_token_that_completes_it(smollm2: Tokenizer) -> None:
    head = CALL[: CALL.index("}}") + 2]
    for size in (1, 1000):
        parts, delta, tokens = assemble(smollm2, f"{CALL}\n{CALL}", size=size, only_one=True)
        assert parts == [ToolCall("f", '{"a": "STOP"}')]
        assert (delta.finished, delta.finish_reason, delta.stop_reason) == (True, "stop", None)
        assert abs(tokens - len(smollm2.encode(head))) <= 1


def test_special_tokens_reach_the_reader_but_not_the_client(smollm2: Tokenizer) -> None:
    reader = AnswerFormats("hermes").reader(("f",))
    assembler = OutputAssembler(smollm2, reader=reader)
    delta = assembler.push(smollm2.encode("a<|im_end|>b", add_special_tokens=False), None, "stop")
    assert delta.parts == [Content("ab")]

    class Shown:
        markers = ("<|im_end|>",)
        complete = False

        def push(self, text: str) -> list[Part]:
            return [Content(text)]

        def finish(self) -> list[Part]:
            return []

    assembler = OutputAssembler(smollm2, reader=Shown())
    delta = assembler.push(smollm2.encode("a<|im_end|>b<|im_start|>", add_special_tokens=False), None, "stop")
    assert delta.parts == [Content("a<|im_end|>b")]
