"""What schemas may say: refused with its place, or rewritten to what means the same."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.grammars.compile import check_depth, quote
from lowlat.grammars.grammar import GrammarError
from lowlat.grammars.patterns import length_pattern, safe_pattern
from lowlat.grammars.schema import prepare_schema


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "array", "uniqueItems": True}, "$.uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "$.properties.a.not"),
        ({"anyOf": [{"type": "null"}, {"type": "array", "contains": {}}]}, "$.anyOf[1].contains"),
        ({"$defs": {"x": {"if": {}}}}, "$.$defs.x.if"),
        ({"$ref": "#", "minimum": 3}, "$.minimum"),
        ({"minimum": 3}, "$.minimum"),
        ({"type": "string", "format": "colour"}, "$.format"),
        ({"type": "object", "required": ["a"]}, "$.required"),
        ({"type": "string", "enum": ["a", 1]}, "$"),
        ({"type": "integer", "const": 1.5}, "$"),
        ({"anyOf": [{}], "allOf": [{}]}, "$"),
        ({"type": "object", "anyOf": [{}]}, "$"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "$.pattern"),
        ({"type": "string", "maxLength": -1}, "$.maxLength"),
        ({"type": "string", "maxLength": 1, "minLength": 2}, "$.maxLength"),
        ({"type": "string", "pattern": 'say "a"'}, "$.pattern"),
        ({"type": "object", "patternProperties": {"\\n": {}}}, "$.patternProperties"),
        ({"type": 3}, "$.type"),
        ({"type": "array", "items": 3}, "$.items"),
        ({"type": "object", "required": 5}, "$.required"),
        ({"type": "object", "required": [{}]}, "$.required"),
        ({"type": "object", "required": "ab"}, "$.required"),
        ({"type": "string", "format": []}, "$.format"),
        ({"type": [{}], "enum": [1]}, "$.type"),
        ({"type": "integer", "const": math.inf}, "$"),
        ({"type": "integer", "enum": [math.nan]}, "$"),
        ({"type": "integer", "const": True}, "$"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, where: str):
    with pytest.raises(GrammarError, match="^" + re.escape(where) + "[.: ]"):
        prepare_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "array", "uniqueItems": False, "items": {"type": ["integer", "null"], "minimum": 0}},
        {"title": "T", "description": "D", "default": 1, "$schema": "x", "type": "integer", "enum": [1, 2.0]},
        {"$defs": {"a": {"type": "null"}}, "type": "object", "properties": {"b": {"$ref": "#/$defs/a", "title": "B"}}},
        {"oneOf": [{"const": 1}, {"const": 2}], "discriminator": {"propertyName": "kind"}},
        {"type": "string", "format": "date"},
    ],
)
def test_what_can_be_enforced_stays_as_it_is(schema: Any):
    before = json.dumps(schema)
    prepare_schema(schema)
    assert json.dumps(schema) == before


@given(least=st.integers(0, 3), more=st.one_of(st.none(), st.integers(0, 3)), text=st.text(max_size=8))
def test_lengths_become_patterns(least: int, more: int | None, text: str):
    most = None if more is None else least + more
    plain = not re.search(r'[\x00-\x1f"\\]', text)
    fits = plain and least <= len(text) and (most is None or len(text) <= most)
    assert bool(re.fullmatch(length_pattern(least, most)[1:-1], text)) == fits


@pytest.mark.filterwarnings("ignore::FutureWarning")
@given(pattern=st.text(alphabet='ab[]^é\\dn.x2"0', max_size=12), text=st.text(alphabet='abdnx20é"\\\n', max_size=4))
def test_a_pattern_that_passes_means_the_same(pattern: str, text: str):
    try:
        wanted = re.compile(pattern)
        written = safe_pattern(pattern)
    except (re.error, GrammarError):
        return
    assert written.isascii()
    assert bool(re.search(written, text)) == bool(wanted.search(text))


@pytest.mark.parametrize("pattern", ['a"', r"\\", r"\"", r"\n", r"[\t]", r"\x1f", r"\u0022", r"\cA", "\n", r'["]'])
def test_a_pattern_that_names_what_json_escapes_is_refused(pattern: str):
    with pytest.raises(GrammarError, match="cannot be enforced"):
        safe_pattern(pattern)


@pytest.mark.parametrize("pattern", [r'[^"\\]', r"\w\s\d\.", r"[^\x00-\x1f]", r"\.\/\-"])
def test_a_pattern_that_leaves_them_out_passes(pattern: str):
    assert safe_pattern(pattern) == pattern


def test_depth_counts_brackets_outside_of_strings():
    check_depth('{"a": "((((((("}', 1)
    check_depth(r"\(\(\((a)", 1)
    with pytest.raises(GrammarError, match="limit of 3"):
        check_depth("[[[[", 3)


@given(text=st.text())
def test_literals_are_on_one_line(text: str):
    assert "\n" not in quote(text)
    assert quote(text).startswith('"')
