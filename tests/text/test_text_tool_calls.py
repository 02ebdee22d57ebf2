"""Readers of tool calls and reasoning: every form, every split of a text, and everything that is not quite a call."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.tool_calls.formats import CALL_FORMATS, TOOL_PARSERS, AnswerFormats, choose_formats
from lowlat.text.tool_calls.json_scanner import JsonScanner
from lowlat.text.tool_calls.parts import Content, Part, Reasoning, ToolCall, joined
from lowlat.text.tool_calls.source import MAX_CALL_CHARACTERS

NAMES = ("weather", "math.add", "no_arguments")


def read(
    form: str, pieces: Sequence[str], reasoning: str | None = None, opened: bool = False, only_one: bool = False
) -> list[Part]:
    reader = AnswerFormats(form, reasoning).reader(NAMES, only_one=only_one, opened=opened)
    assert reader is not None
    parts: list[Part] = []
    for piece in pieces:
        parts += reader.push(piece)
    return joined(parts + reader.finish())


def written(form: str, name: str, arguments: dict) -> str:
    """One call as a model of that family writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if form == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
    if form == "llama3":
        return f'{{"name": "{name}", "parameters": {text}}}'
    if form == "deepseek_v3":
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
    if form == "deepseek_v31":
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    if form == "harmony":
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
    if form == "muse":
        inside = "".join(
            f'<atem:parameter name="{key}">{json.dumps(value, ensure_ascii=False)}</atem:parameter>\n'
            for key, value in arguments.items()
        )
        return (
            f' to=functions.{name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inside}'
            "</atem:invoke>\n</atem:function_calls><|eom|>"
        )
    space = " " if form == "deepseek_v41" else ""
    inside = "".join(
        f'<｜DSML｜{space}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</｜DSML｜{space}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜{space}invoke name="{name}">\n{inside}</｜DSML｜{space}invoke>'


def answer(form: str, content: str, calls: Sequence[tuple[str, dict]]) -> str:
    """A whole answer: content, then calls, with the family's markup around."""
    texts = [written(form, name, arguments) for name, arguments in calls]
    if form == "llama3":
        # Content and calls exclude each other, unless the tag stands between.
        return content + ("<|python_tag|>" if content else "") + "; ".join(texts)
    if form in ("harmony", "muse"):
        head = "<|channel|>final<|message|>" if form == "harmony" else " to=user<|message|>"
        end = "<|end|>" if form == "harmony" else "<|eom|>"
        messages = ([f"{head}{content}{end}"] if content else []) + texts
        return "<|start|>assistant".join(messages)
    if form.startswith("deepseek_v3") and form != "deepseek_v32":
        return (
            content
            + "<｜tool▁calls▁begin｜>"
            + ("\n" if form == "deepseek_v3" else "").join(texts)
            + "<｜tool▁calls▁end｜>"
        )
    if form.startswith("deepseek"):
        name = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls", "deepseek_v41": " calls"}[form]
        return content + f"\n\n<｜DSML｜{name}>\n" + "\n".join(texts) + f"\n</｜DSML｜{name}>"
    return content + "\n" + "\n".join(texts)


CALLS = [
    ("weather", {"city": 'Paris "<tool_call>" \\ }{ é 世', "days": 3, "more": {"a": [1, None, True], "b": "}"}}),
    ("no_arguments", {}),
    ("math.add", {"a": -1.5, "b": "line\nbreak"}),
]


def expected(content: str, calls: Sequence[tuple[str, dict]]) -> list[Part]:
    parts: list[Part] = [Content(content)] if content else []
    return parts + [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


@pytest.mark.parametrize("form", TOOL_PARSERS)
@pytest.mark.parametrize("content", ["", "I look it up."])
def test_every_form_is_read_whole_and_at_every_split(form: str, content: str) -> None:
    text = answer(form, content, CALLS)
    assert read(form, [text]) == expected(content, CALLS)
    assert read(form, list(text)) == expected(content, CALLS)
    for at in range(1, len(text)):
        assert read(form, [text[:at], text[at:]]) == expected(content, CALLS), text[:at]


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_content_of_a_stream_never_holds_a_marker_of_a_call(form: str) -> None:
    text = answer(form, "I look.", CALLS)
    reader = AnswerFormats(form).reader(NAMES)
    assert reader is not None
    parts = [part for character in text for part in reader.push(character)] + reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, Content)) == "I look."
    # Content comes as soon as it can be no marker.
    assert isinstance(parts[0], Content)
    assert len(parts[0].text) < len("I look.")


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_an_answer_without_calls_is_content(form: str) -> None:
    for text in ("Plain < text { with <tool", "  \n spaced \n\n", "a" * 5000, "{}", "[1]", "<", "\n"):
        assert read(form, [text]) == read(form, list(text)) == [Content(text)] or (
            text == "\n" and form in ("harmony", "muse")
        )


JSON_FORMS = [form for form in TOOL_PARSERS if form not in ("deepseek_v4", "deepseek_v41", "deepseek_v32", "muse")]


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_calls_of_functions_that_were_not_offered_are_content(form: str) -> None:
    text = answer(form, "", [("unknown", {"a": 1})])
    parts = read(form, [text])
    assert all(isinstance(part, Content) for part in parts)
    assert "unknown" in "".join(part.text for part in parts if isinstance(part, Content))
    assert read(form, list(text)) == parts


@pytest.mark.parametrize("form", JSON_FORMS)
@pytest.mark.parametrize(
    "arguments",
    ["[1]", '"text"', "{,}", '{"a": NaN}', '{"a": 1e999}', "{'a': 1}", "[" * 100, '{"a": ' + "9" * 5000 + "}"],
)
def test_malformed_arguments_are_content_and_nothing_is_lost(form: str, arguments: str) -> None:
    text = answer(form, "", [("weather", {"mark": 1})]).replace('{"mark": 1}', arguments)
    parts = read(form, [text])
    assert not [part for part in parts if isinstance(part, ToolCall)]
    assert arguments in "".join(part.text for part in parts if isinstance(part, Content))
    for at in range(1, len(text), 1 + len(text) // 200):
        assert read(form, [text[:at], text[at:]]) == parts


@pytest.mark.parametrize("form", [form for form in TOOL_PARSERS if form != "llama3"])
def test_a_good_call_after_a_bad_one_is_found(form: str) -> None:
    """Of Llama's form a call without a tag counts only at the answer's start."""
    text = answer(form, "", [("unknown", {"a": 1}), ("weather", {"city": "Rome"})])
    parts = read(form, [text])
    assert [part for part in parts if isinstance(part, ToolCall)] == [ToolCall("weather", '{"city": "Rome"}')]
    assert read(form, list(text)) == parts


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_a_cut_answer_loses_nothing(form: str) -> None:
    """Cut anywhere (by a length limit), what was whole is a call, and what was not is content."""
    text = answer(form, "", [("weather", {"city": "Rome", "days": 2})])
    seen_call = False
    for at in range(1, len(text) + 1):
        parts = read(form, [text[:at]])
        calls = [part for part in parts if isinstance(part, ToolCall)]
        left = "".join(part.text for part in parts if isinstance(part, Content))
        if calls:
            seen_call = True
            assert calls == [ToolCall("weather", '{"city": "Rome", "days": 2}')]
            assert not left
        else:
            assert not seen_call
            assert left.strip() == text[:at].strip() or (form in ("muse", "harmony") and left in text[:at])
    assert seen_call


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_with_one_call_allowed_the_answer_is_complete_after_it(form: str) -> None:
    reader = AnswerFormats(form).reader(NAMES, only_one=True)
    assert reader is not None
    parts: list[Part] = []
    for character in answer(form, "", CALLS):
        parts += reader.push(character)
        if reader.complete:
            break
    assert reader.complete
    assert joined(parts) == expected("", CALLS[:1])


texts = st.text(alphabet=st.sampled_from("ab \n<>{}\"\\'|:,é世_"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
MARKERS = sorted(
    {m for name in CALL_FORMATS for f in [CALL_FORMATS[name]()] for m in (*f.openers, *f.before, *f.after)}
)


@settings(max_examples=80, deadline=None)
@given(
    form=st.sampled_from(TOOL_PARSERS),
    pieces=st.lists(
        texts
        | st.sampled_from(
            [*MARKERS, "<think>", "</think>", "<|start|>", "<|message|>", " to=user", "<|eom|>", "<|end|>"]
        )
        | st.builds(
            lambda form, name, value: written(form, name, {"a": value}),
            st.sampled_from(TOOL_PARSERS),
            st.sampled_from(["weather", "unknown"]),
            values,
        ),
        max_size=8,
    ),
    thinks=st.booleans(),
    opened=st.booleans(),
    data=st.data(),
)
def test_any_split_of_any_text_gives_the_same(form: str, pieces: list[str], thinks: bool, opened: bool, data) -> None:
    text = "".join(pieces)
    reasoning = form if form in ("muse", "harmony") else "think" if thinks else None
    whole = read(form, [text], reasoning, opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    split = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, split, reasoning, opened) == whole
    assert read(form, list(text), reasoning, opened) == whole
    for part in whole:
        if isinstance(part, ToolCall):
            assert part.name in NAMES
            assert isinstance(json.loads(part.arguments), dict)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([form for form in TOOL_PARSERS if form != "muse"]),
    arguments=st.dictionaries(st.text("abc_", min_size=1, max_size=5), values, max_size=4),
    content=st.sampled_from(["", "So: "]),
)
def test_any_arguments_come_back_as_they_were(form: str, arguments: dict, content: str) -> None:
    found = read(form, [answer(form, content, [("weather", arguments)])])
    (call,) = [part for part in found if isinstance(part, ToolCall)]
    assert json.loads(call.arguments) == arguments


def test_reasoning_is_split_at_every_cut() -> None:
    for text, opened in (("weighing it</think>Answer.", True), ("<think>\nweighing it\n</think>\n\nAnswer.", False)):
        for at in range(len(text) + 1):
            found = read("hermes", [text[:at], text[at:]], "think", opened)
            assert found == [Reasoning("weighing it"), Content("Answer.")]
    assert read("hermes", ["no tag </think> here"], "think") == [Content("no tag </think> here")]
    assert read("hermes", [" still thinking </thi"], "think", True) == [Reasoning("still thinking </thi")]
    assert read("hermes", ["<think></think>x"], "think") == [Content("x")]
    assert read("hermes", ["<think>x"], "think", True) == [Reasoning("x")]
    later = "Yes. <think>not reasoning</think>"
    assert read("hermes", [later], "think") == [Content(later)]


def test_reasoning_then_a_call() -> None:
    call = written("hermes", "weather", {"city": "Rome"})
    text = f"<think>\nI need <tool_call>{{ the tool\n</think>\n\nWait.\n{call}"
    whole = [Reasoning("I need <tool_call>{ the tool"), Content("Wait."), ToolCall("weather", '{"city": "Rome"}')]
    for at in range(len(text) + 1):
        assert read("hermes", [text[:at], text[at:]], "think") == whole


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "harmony",
            "<|channel|>analysis<|message|>hm {}<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
            '<|message|>{"city":"Rome"}<|call|>',
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm {}<|end|><|start|>assistant<|channel|>final<|message|>I look.<|end|>"
            '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city":"Rome"}',
        ),
        (
            "muse",
            " to=self<|message|>hm {}<|eom|><|start|>assistant to=commentary<|message|>I look.<|eom|>"
            "<|start|>assistant to=functions.weather<|message|><atem:function_calls>\n"
            '<atem:invoke name="weather.weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
            "</atem:invoke>\n</atem:function_calls><|eot|>",
        ),
    ],
)
def test_channels_have_reasoning_content_and_calls(form: str, text: str) -> None:
    whole = [Reasoning("hm {}"), Content("I look."), ToolCall("weather", '{"city": "Rome"}')]
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]], form) == whole, text[:at]


def test_lone_surrogates_can_be_sent() -> None:
    (call,) = read("hermes", ['<tool_call>{"name": "weather", "arguments": {"a": "\\ud800"}}'])
    assert isinstance(call, ToolCall)
    assert call.arguments.encode() == b'{"a": "\\ud800"}'


def test_a_call_beyond_the_limit_is_content() -> None:
    text = written("hermes", "weather", {"a": "x" * (MAX_CALL_CHARACTERS + 10)})
    pieces = [text[at : at + 65536] for at in range(0, len(text), 65536)]
    parts = read("hermes", pieces)
    assert not [part for part in parts if isinstance(part, ToolCall)]
    assert "".join(part.text for part in parts if isinstance(part, Content)) == text


@given(value=values, tail=texts, cut=st.integers(0, 400))
@settings(deadline=None)
def test_the_scanner_finds_the_end_of_what_json_writes(value, tail: str, cut: int) -> None:
    for indent in (None, 1):
        text = json.dumps([value], ensure_ascii=False, indent=indent)
        scanner = JsonScanner()
        whole = text + tail
        cut = min(cut, len(whole))
        used = 0
        for piece in (whole[:cut], whole[cut:]):
            if not scanner.complete:
                used += scanner.feed(piece)
        assert (scanner.complete, scanner.wrong, used) == (True, False, len(text))


@pytest.mark.parametrize(
    "text",
    ["{]", "{1", '{"a" 1', '{"a":,', '{"a":1,}', "[1,]", "[tru]", "[01x]", '["a" "b"', "x", "1", '"a"', "[}", "[--1]"],
)
def test_the_scanner_stops_at_what_cannot_be_json(text: str) -> None:
    scanner = JsonScanner()
    for character in text:
        assert not scanner.wrong or character != text[0]
        if scanner.wrong:
            break
        scanner.feed(character)
    assert scanner.wrong
    assert not scanner.complete


def test_formats_are_chosen_by_template_then_architecture() -> None:
    qwen3 = "{{ tools }} <tool_call> <think>"
    assert choose_formats(qwen3) == AnswerFormats("hermes", "think")
    assert choose_formats("{{ tools }} <|start_header_id|>") == AnswerFormats("llama3", None)
    assert choose_formats("{{ tools }} <｜tool▁call▁begin｜> ```json <think>") == AnswerFormats("deepseek_v3", "think")
    assert choose_formats("{{ tools }} <｜tool▁call▁begin｜>").tools == "deepseek_v31"
    assert choose_formats("{{ tools }} <|channel|>") == AnswerFormats("harmony", "harmony")
    assert choose_formats("{{ tools }} atem:function_calls") == AnswerFormats("muse", "muse")
    assert choose_formats(None, "DeepseekV41ForCausalLM") == AnswerFormats("deepseek_v41", "think")
    assert choose_formats("<|im_start|>") == AnswerFormats("hermes", None)
    assert choose_formats("<|start_header_id|>") == AnswerFormats("hermes", None)
    assert choose_formats(qwen3, tools="llama3", reasoning="off") == AnswerFormats("llama3", None)
    with pytest.raises(ValueError, match="no tool parser 'x'"):
        choose_formats(None, tools="x")
    with pytest.raises(ValueError, match="cannot read the same answer"):
        choose_formats(None, tools="hermes", reasoning="harmony")
    assert AnswerFormats("hermes", None).reader(()) is None
