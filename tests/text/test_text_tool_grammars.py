"""Grammars of tool calls accept what each family writes, and nothing that is not a valid call."""

from __future__ import annotations

import json

import pytest
from test_text_tool_calls import answer

from lowlat.text.tool_calls.formats import TOOL_PARSERS, AnswerFormats
from lowlat.text.tool_calls.grammars import ONE_CALL_ONLY, Function, calls_grammar
from lowlat.text.tool_calls.parts import Reasoning, ToolCall, joined

xgrammar = pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
FUNCTIONS = [
    Function("weather", SCHEMA),
    Function("math.add", {"type": "object", "properties": {}}),
]
GOOD = {"city": 'Paris "x" <b> é', "unit": "C", "days": 3, "places": [{"x": 1.5}]}


def accepts(tag: dict, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(json.dumps(tag)), text)


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_a_grammar_accepts_valid_calls_only(form: str) -> None:
    tag = calls_grammar(form, FUNCTIONS, only_one=False)
    two = [("weather", GOOD), ("math.add", {})]
    assert accepts(tag, answer(form, "", two[:1]).strip("\n") if form != "muse" else answer(form, "", two[:1]))
    assert accepts(tag, answer(form, "", [("weather", {"city": "a", "days": 1})]).strip("\n"))
    assert accepts(tag, answer(form, "", two).strip("\n")) == (form not in ONE_CALL_ONLY)
    assert not accepts(calls_grammar(form, FUNCTIONS, only_one=True), answer(form, "", two).strip("\n"))
    for wrong in ({"city": "a"}, {"city": "a", "days": "x"}, GOOD | {"unit": "K"}, GOOD | {"places": [{}]}):
        assert not accepts(tag, answer(form, "", [("weather", wrong)]).strip("\n")), wrong
    assert not accepts(tag, answer(form, "", [("unknown", {})]).strip("\n"))
    assert not accepts(tag, "")
    assert not accepts(tag, "Hello")


REASONING = {
    "think": ("<think>\nhm <tool_call></think>\n\n", "hermes"),
    "harmony": ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "harmony"),
    "muse": (" to=self<|message|>hm<|eom|><|start|>assistant", "muse"),
}


@pytest.mark.parametrize("reasoning", REASONING)
def test_reasoning_comes_first_and_is_free(reasoning: str) -> None:
    thought, form = REASONING[reasoning]
    call = answer(form, "", [("weather", GOOD)]).strip("\n")
    tag = calls_grammar(form, FUNCTIONS, only_one=False, reasoning=reasoning)
    assert accepts(tag, thought + call)
    assert accepts(tag, call)
    assert not accepts(tag, thought)
    assert not accepts(tag, thought + "Hello")
    reader = AnswerFormats(form, reasoning).reader(["weather"])
    assert reader is not None
    parts = joined(reader.push(thought + call) + reader.finish())
    assert isinstance(parts[0], Reasoning)
    assert parts[1:] == [ToolCall("weather", json.dumps(GOOD, ensure_ascii=False))]


def test_reasoning_that_the_prompt_began_must_end() -> None:
    call = answer("hermes", "", [("weather", GOOD)]).strip("\n")
    tag = calls_grammar("hermes", FUNCTIONS, only_one=True, reasoning="think", opened=True)
    assert accepts(tag, "hm</think>\n\n" + call)
    assert accepts(tag, "</think>" + call)
    assert not accepts(tag, call)
