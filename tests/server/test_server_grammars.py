"""Grammars over HTTP, with a tiny random model in a real engine process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from server_kit import Live, live_server, wait_for

from grammar_kit import SETTINGS, byte_level, save_tiny
from lowlat.engine.config import EngineConfig
from lowlat.engine.supervisor import ENGINE_PROGRAM
from lowlat.server.text_model import load_text_model

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), byte_level())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    yield from serve(folder)


def serve(folder: Path) -> Iterator[Live]:
    config = EngineConfig(model=str(folder), **SETTINGS, grammar_seconds=0.8, grammar_memory_mib=256)
    text = load_text_model(str(folder), "fake")
    with live_server(text=text, config=config, program=ENGINE_PROGRAM, wait_ready=False) as server:
        wait_for(lambda: server.http.get("/ready").status_code == 200 or server.state.engine.health().error)
        assert server.state.engine.health().error is None
        yield server


def test_a_chat_answers_by_its_schema(tiny: Live):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    reply = tiny.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Weather?"}],
        response_format=form,
        max_tokens=300,
        n=2,
        seed=4,
    ).json()
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop", "stop"]
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert texts[0] != texts[1]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_grammar": 'root ::= "<" [a-z]{2,4} ">"'}, "<[a-z]{2,4}>"),
        ({"structured_outputs": {"json": {"type": "array", "items": {"const": 1}, "maxItems": 2}}}, r"\[[\s1,]*\]"),
    ],
)
def test_a_stream_says_the_same_and_ends(tiny: Live, fields: dict[str, Any], pattern: str):
    body = {"prompt": "go", "max_tokens": 300, "seed": 7, **fields}
    whole = tiny.complete(**body)["choices"][0]
    text, finish = "", None
    with tiny.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
    assert (text, finish) == (whole["text"], "stop")
    assert re.fullmatch(pattern, text)


def test_a_cut_answer_has_finish_reason_length(tiny: Live):
    choice = tiny.complete(prompt="a", max_tokens=2, guided_regex="[a-z]{50}")["choices"][0]
    assert choice["finish_reason"] == "length"


CATASTROPHES = {
    "nested counts": {"structured_outputs": {"regex": "((([a-z]{1,50}){1,50}){1,50}){1,50}"}},
    "optional counts": {"structured_outputs": {"regex": "(((((a?){1000}){1000}){1000}){1000}){1000}"}},
    "ambiguous": {
        "structured_outputs": {"grammar": 'root ::= a{0,9999}\na ::= b{0,9999}\nb ::= c{0,9999}\nc ::= "x"?'}
    },
    "a megabyte": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"enum": [f"value {n}" for n in range(70_000)]}},
        }
    },
    "references in a circle": {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "deep": {"guided_json": '{"type":"array","items":' * 500 + "{}" + "}" * 500},
    "deep groups": {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000},
}


def test_catastrophes_are_refused_while_a_stream_goes_on(tiny: Live):
    """The number of tokens that another client got is what counts, not the time."""
    got, done = [0], threading.Event()

    def stream() -> None:
        body = {"prompt": "on and on", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
        while not done.is_set():
            with tiny.http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    got[0] += line.startswith("data: {")
                    if done.is_set():
                        break

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for name, fields in CATASTROPHES.items():
            wait_for(lambda before=got[0]: got[0] > before)
            before = got[0]
            answer = tiny.http.post("/v1/completions", json={"prompt": "a", **fields})
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"].split(".")[0] in (*fields, "response_format"), name
            if name in ("nested counts", "optional counts", "ambiguous"):
                assert "--grammar-seconds" in error["message"], name
                assert got[0] - before >= 5, name
    finally:
        done.set()
        thread.join()
    assert tiny.state.engine.restarts == 0
    assert tiny.complete(prompt="a", max_tokens=9, guided_choice=["fine"])["choices"][0]["text"] == "fine"


def test_a_refused_grammar_says_where_it_is_wrong(tiny: Live):
    answer = tiny.http.post("/v1/completions", json={"prompt": "a", "guided_grammar": 'root ::= "a" | other'})
    assert answer.status_code == 400
    assert '"other" is not defined' in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "invalid_grammar"
    both = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    both |= {"tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = tiny.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **both})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("response_format", "tool_choice")
