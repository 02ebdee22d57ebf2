"""Every kind of grammar, on tiny random models: what comes out is what was asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowlat import Engine, Grammar, SamplingParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y", None, 3]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "next"],
}
LIST = 'root ::= item (", " item){1,4}\nitem ::= [a-c]{1,3} | "é" | "😀"\n'


def in_list(text: str) -> bool:
    return re.fullmatch(r"([a-c]{1,3}|é|😀)(, ([a-c]{1,3}|é|😀)){1,4}", text) is not None


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES = [
    (Grammar.json_schema(SCHEMA), fits_schema),
    (Grammar("regex", r"[A-F]{2}-\d{1,3}(x|\.y)?"), re.compile(r"[A-F]{2}-\d{1,3}(x|\.y)?").fullmatch),
    (Grammar("ebnf", LIST), in_list),
    (Grammar.choice(["yes", "no", "maybe", "né"]), {"yes", "no", "maybe", "né"}.__contains__),
    (
        Grammar(
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"tag","begin":"<f>",'
            '"content":{"type":"regex","pattern":"[0-9]{3}"},"end":"</f>"}}',
        ),
        re.compile(r"<f>[0-9]{3}</f>").fullmatch,
    ),
]


@pytest.mark.parametrize("kind", ["engine", "piece_engine"])
def test_every_kind_is_kept_to_at_any_temperature(kind: str, request: pytest.FixtureRequest):
    engine: Engine = request.getfixturevalue(kind)
    sampling = [
        SamplingParams(max_tokens=600, temperature=temperature, seed=seed, grammar=grammar, **options)
        for grammar, _ in CASES
        for seed, temperature, options in (
            (1, 0.0, {}),
            (2, 1.0, {}),
            (3, 1.0, {"repetition_penalty": 1.4, "logit_bias": ((65, 50.0), (300, 100.0))}),
        )
    ]
    answers = engine.generate([[1, 2, 3]] * len(sampling), sampling)
    for n, answer in enumerate(answers):
        grammar, fits = CASES[n // 3]
        assert answer.finish_reason == "stop", (grammar, answer.text)
        assert fits(answer.text), (grammar, answer.text)
        assert answer.token_ids[-1] in (300, 301)
        assert answer.usage.completion_tokens == len(answer.token_ids)


def test_any_json_object(engine: Engine):
    """A random model rarely ends one by itself, so its ends are made likely."""
    close = ((ord("}"), 40.0), (ord('"'), 20.0), (ord(":"), 20.0), (300, 40.0))
    sampling = [
        SamplingParams(max_tokens=400, seed=n, grammar=Grammar("json_object"), logit_bias=close) for n in range(16)
    ]
    answers = engine.generate([[1, 2]] * len(sampling), sampling)
    ended = [json.loads(answer.text) for answer in answers if answer.finish_reason == "stop"]
    assert ended
    assert all(isinstance(value, dict) for value in ended)
    assert all(answer.text.startswith("{") for answer in answers)


def test_a_choice_is_each_of_its_options(engine: Engine):
    options = ["yes", "no", "maybe", 'a "quoted" \\ one\n', "né", "yes, indeed"]
    even = [SamplingParams(max_tokens=60, seed=n, temperature=50.0, grammar=Grammar.choice(options)) for n in range(60)]
    said = [answer.text for answer in engine.generate([[5]] * 60, even)]
    assert set(said) == set(options)


def test_an_answer_that_is_cut_has_finish_reason_length(engine: Engine):
    sampling = SamplingParams(max_tokens=4, temperature=0, grammar=Grammar("regex", "[a-z]{30}"))
    answer = engine.generate([1], sampling)
    assert answer.finish_reason == "length"
    assert re.fullmatch("[a-z]{4,20}", answer.text)


def schemas() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.sampled_from(
            [{"type": "null"}, {"type": "boolean"}, {"const": "é\n"}, {"enum": [1, "two", [3], {"a": None}]}]
        ),
        st.tuples(st.integers(-40, 40), st.integers(0, 60)).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
            lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
        ),
        st.sampled_from(["^[a-c]{1,4}$", "^x(y|z)?$"]).map(lambda text: {"type": "string", "pattern": text}),
    )

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
        )
        names = st.dictionaries(st.sampled_from(["a", "b c", 'q"', "é"]), inner, max_size=3)
        objects = st.tuples(names, st.sets(st.sampled_from(["a", "b c", 'q"', "é"]))).map(
            lambda of: {"type": "object", "properties": of[0], "required": sorted(of[1] & of[0].keys())}
        )
        return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of}))

    return st.recursive(leaves, grow, max_leaves=5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_answers_validate_against_their_schema(engine: Engine, schema: Any, seed: int):
    sampling = SamplingParams(max_tokens=1500, seed=seed, grammar=Grammar.json_schema(schema))
    answer = engine.generate([1, 2, 3], sampling)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=st.lists(st.text(max_size=8), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_choices_of_any_text(engine: Engine, options: list[str], seed: int):
    options = [option.encode("utf-8", "replace").decode().replace("\0", "0") for option in options]
    answer = engine.generate([1], SamplingParams(max_tokens=64, seed=seed, grammar=Grammar.choice(options)))
    assert answer.text in options
