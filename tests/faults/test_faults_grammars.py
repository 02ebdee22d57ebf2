"""Faults of grammars: reasoning that ends inside a burst, bad grammars beside good streams, masks and scores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from faults_kit import at_rest
from server_kit import Live, wait_for
from test_server_grammars import TEMPLATE, serve

from grammar_kit import SETTINGS, VOCABULARY, byte_level, save_tiny
from lowlat import Engine, Grammar, SamplingParams
from lowlat.engine import runner
from lowlat.server.tool_plan import behind_reasoning
from lowlat.text.tool_calls.formats import AnswerFormats, Reading
from lowlat.text.tool_calls.parts import Content, joined

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "city": {"enum": ["Rome", "Oslo"]}},
    "required": ["ok", "city"],
}
MARKER, FENCE = "</think>", "`"


def save_chain(path: Path, text: str) -> Path:
    """A model whose next token depends on the last one alone: it says `text`, then its last character for ever.
    White space is unlikely."""
    save_tiny(
        path,
        byte_level(),
        hidden_size=VOCABULARY,
        num_hidden_layers=1,
        intermediate_size=8,
        tie_word_embeddings=False,
    )
    file = path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    weights["model.embed_tokens.weight"] = torch.eye(VOCABULARY)
    follower = dict.fromkeys(range(VOCABULARY), ord(text[0]))
    follower |= {ord(one): ord(other) for one, other in zip(text, text[1:] + text[-1], strict=True)}
    head = torch.zeros(VOCABULARY, VOCABULARY)
    head[list(b" \t\r\n")] = -8 / VOCABULARY**0.5
    for token, next_token in follower.items():
        head[next_token, token] = 8 / VOCABULARY**0.5
    weights["lm_head.weight"] = head
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    return path


@pytest.mark.parametrize("spec", ["draft-model", "ngram"])
def test_a24_the_grammar_holds_from_the_end_of_reasoning_on_within_a_burst(tmp_path, monkeypatch, spec):
    """A model that wants a fence behind its reasoning, and guesses that say so: the fence never comes."""
    thought = "abcd" + MARKER + FENCE
    folder = str(save_chain(tmp_path, thought))
    reading = Reading(AnswerFormats("hermes", "think"), opened=True)
    grammar = behind_reasoning(Grammar.json_schema(SCHEMA), reading, "response_format")
    prompt = list((thought + 5 * FENCE + "q").encode())
    sampled = [SamplingParams(max_tokens=400, seed=seed, grammar=grammar) for seed in range(5)]
    sampled.append(SamplingParams(max_tokens=400, temperature=0, seed=99, grammar=grammar))

    def answers(**settings: Any) -> list[Any]:
        with Engine(model=folder, **SETTINGS | settings) as engine:
            return engine.generate([prompt] * len(sampled), sampled)

    free = SamplingParams(max_tokens=16, temperature=0)
    with Engine(model=folder, **SETTINGS) as engine:
        assert engine.generate(prompt, free).text == thought + FENCE * 3, "what the model says by itself"
    plain = answers()
    ended_at: dict[int, set[int]] = {one.seed: set() for one in sampled}

    def watch(logits: Any, settings: Any, positions: Any, rules: Any, guesses: list[list[int]]) -> Any:
        """Note places of tokens that were right guesses, whose next guess was a fence and was not taken."""
        bursts, entries = original(logits, settings, positions, rules, guesses)
        for setting, position, guessed, burst in zip(settings, positions, guesses, bursts, strict=True):
            right = len(burst) - 1
            if 0 < right < len(guessed) and guessed[right] == ord(FENCE):
                ended_at[setting.seed].add(position + right - 1 - len(prompt))
        return bursts, entries

    original = runner.sample_bursts
    monkeypatch.setattr(runner, "sample_bursts", watch)
    drafted = answers(spec=spec, spec_width=8, **({"draft": folder} if spec == "draft-model" else {}))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    crossed = 0
    for one, sampling in zip(drafted, sampled, strict=True):
        end = bytes(min(id, 255) for id in one.token_ids).index(MARKER.encode()) + len(MARKER) - 1
        crossed += end in ended_at[sampling.seed]
        assert one.finish_reason == "stop"
        reader = reading.reader()
        assert reader is not None
        *_, answer = joined(reader.push(one.text) + reader.finish())
        assert isinstance(answer, Content)
        value = json.loads(answer.text)
        assert set(value) == {"ok", "city"}
        assert isinstance(value["ok"], bool)
        assert value["city"] in ("Rome", "Oslo")
    assert crossed >= 3, "markers were accepted in the middle of bursts whose guesses went on with the fence"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), byte_level())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    yield from serve(folder)


def nested(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "integer"}
    inner = nested(depth - 1)
    return {"oneOf": [{"type": "object", "properties": {name: inner}, "required": [name]} for name in "ab"]}


def test_a26_a_bad_grammar_is_its_own_callers_trouble_alone(tiny: Live):
    """Each is refused while a stream runs beside it, which says what it says alone; nothing is left of them."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"foo": "bar"}}}}
    deep = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(12)}}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "("}, "guided_regex"),
        ({"response_format": form}, "response_format"),
        ({"guided_json": {"properties": {"foo": "bar"}}}, "guided_json"),
        ({"response_format": deep}, "response_format"),
    ]
    body = {"prompt": "on", "max_tokens": 1200, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = tiny.complete(**body)["choices"][0]["token_ids"]
    got: list[int] = []

    def stream() -> None:
        for event in tiny.stream("/v1/completions", **body):
            if event != "[DONE]":
                got.extend(id for choice in event["choices"] for id in choice["token_ids"])

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream)
        for fields, param in bad:
            before = len(got)
            wait_for(lambda before=before: len(got) > before or running.done())
            answer = tiny.http.post("/v1/completions", json={"prompt": "a", **fields})
            assert answer.status_code == 400, (param, answer.text)
            assert answer.json()["error"]["param"].split(".")[0] == param
        running.result()
    assert got == alone
    assert tiny.state.engine.restarts == 0
    assert at_rest(tiny)
    assert tiny.complete(prompt="a", max_tokens=9, guided_choice=["fine"])["choices"][0]["text"] == "fine"


def test_a14_what_a_grammar_masks_has_the_models_own_log_probability(tiny: Live):
    """Masked tokens stand among the alternatives with finite numbers: those of the model without a grammar."""

    def finite(text: str | bytes) -> Any:
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))

    body = {"prompt": "go", "logprobs": 5, "max_tokens": 1, "temperature": 1, "top_k": 1, "seed": 1}
    free = tiny.complete(**body)["choices"][0]["logprobs"]["top_logprobs"][0]
    for filters in ({}, {"top_k": 0, "top_p": 0.01}, {"top_k": 0, "min_p": 1.0}):
        sent = body | filters | {"guided_choice": ["kkk", "kk!"], "max_tokens": 8}
        answer = tiny.post("/v1/completions", **sent)
        assert answer.status_code == 200
        choice = finite(answer.content)["choices"][0]
        assert choice["text"] in ("kkk", "kk!")
        logprobs = choice["logprobs"]
        assert "k" not in free, "the grammar forbids all of them"
        first = {name: value for name, value in logprobs["top_logprobs"][0].items() if name != "k"}
        assert first == pytest.approx(free, abs=1e-4), "before the mask, as without one"
        values = [value for top in logprobs["top_logprobs"] for value in top.values()] + logprobs["token_logprobs"]
        assert all(-9999 < value <= 0 for value in values)
        joined: dict[str, list[Any]] = {}
        with tiny.http.stream("POST", "/v1/completions", json=sent | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    for name, part in (finite(line[6:])["choices"][0]["logprobs"] or {}).items():
                        joined.setdefault(name, []).extend(part)
        assert joined == logprobs
