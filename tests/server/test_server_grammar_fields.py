"""Grammars as clients ask for them: each spelling, and what is wrong with one."""

import msgspec
import pytest
from server_kit import refuse

from lowlat.grammars.grammar import Grammar
from lowlat.server.bodies import decode_body
from lowlat.server.grammar_fields import grammar_of
from lowlat.server.requests import CompletionRequest

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= (a"}}, "structured_outputs.grammar"),
    ],
)
def test_a_bad_grammar_is_named(live, fields, param):
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": USER})):
        error = refuse(live, path, {**body, **fields})
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": 1}}}},
            "json_schema",
            '{"b":1}',
        ),
        ({"structured_outputs": {"json": '{"b":1}'}}, "json_schema", '{"b":1}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "regex", "[a-c]+"),
        ({"structured_outputs": {"choice": ["b", "a"]}}, "choice", '["b","a"]'),
        ({"structured_outputs": {"grammar": "root ::= a"}}, "ebnf", "root ::= a"),
        ({"guided_json": {"b": 1}}, "json_schema", '{"b":1}'),
        ({"guided_regex": "a"}, "regex", "a"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": "root ::= a"}, "ebnf", "root ::= a"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"any_text"}}',
        ),
    ],
)
def test_each_spelling_of_a_grammar_is_the_grammar_it_says(fields, kind, text):
    body = decode_body(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)
    assert grammar_of(body)[1] == Grammar(kind, text)


def test_a_grammar_without_the_library_names_the_cure(live, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refuse(live, "/v1/completions", {"prompt": "a", "guided_regex": "not seen before"})
    assert error["param"] == "guided_regex"
    assert "pip install" in error["message"]
