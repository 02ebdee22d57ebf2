"""HTTP over a real engine process with a tiny random model: sessions, and logits that are not numbers."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from server_kit import Live, live_server, wait_for

from lowlat import Engine, SamplingParams, Session
from lowlat.engine.config import EngineConfig
from lowlat.engine.supervisor import ENGINE_PROGRAM
from lowlat.server import messages_requests, responses_requests
from lowlat.server.messages_requests import MessagesRequest
from lowlat.server.responses_requests import ResponsesRequest
from tiny_tokenizer import byte_tokenizer

VOCABULARY = 259
LONG = {"ignore_eos": True, "stream": True, "logit_bias": {"258": -100}}
BROKEN = 258
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = float("nan")
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(256))
    return path


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Live]:
    """The KV pool holds 64 pages of 4 tokens: two prompts of the crowd fill it."""
    config = EngineConfig(
        model=str(folder),
        page_size=4,
        kv_tokens=256,
        threads=1,
        session_ttl=60.0,
        session_ttl_max=60.0,
        low_latency="off",
    )
    with live_server(config=config, program=ENGINE_PROGRAM, wait_ready=False) as server:
        wait_for(lambda: server.http.get("/ready").status_code == 200 or server.state.engine.health().error)
        assert server.state.engine.health().error is None
        yield server


def turn(tiny: Live, prompt: list[int], max_tokens: int = 8, **fields: Any) -> tuple[list[int], int]:
    """One request; its prompt and answer, and its cached tokens."""
    fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = tiny.complete(prompt=prompt, max_tokens=max_tokens, **fields)
    said = [*prompt, *answer["choices"][0]["token_ids"]]
    return said, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def some_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def press(tiny: Live) -> None:
    """Other users come and fill the pool several times."""
    for seed in range(6):
        _, cached = turn(tiny, some_tokens(120, 100 + seed))
        assert cached < 120, "the crowd itself was cached: no pressure"


def test_memory_pressure_between_two_turns(tiny: Live):
    said, cached = turn(tiny, some_tokens(40, 1), session_id="agent")
    assert cached == 0
    press(tiny)
    assert turn(tiny, [*said, 1, 2, 3], session_id="agent")[1] == 44, "47 of 48 tokens were computed: 11 whole pages"
    said, cached = turn(tiny, some_tokens(40, 2))
    press(tiny)
    assert turn(tiny, [*said, 1, 2, 3])[1] == 0


def test_sessions_expire_without_traffic_and_end_on_demand(tiny: Live):
    lost = tiny.metric('lowlat_session_pins_lost_total{reason="expired"}')
    turn(tiny, some_tokens(30, 3), session_id="brief", session_ttl=0.5)
    wait_for(lambda: tiny.metric('lowlat_session_pins_lost_total{reason="expired"}') == lost + 1)
    turn(tiny, some_tokens(30, 4), session_id="kept", cache_salt="mine")
    wait_for(lambda: tiny.metric("lowlat_sessions") >= 1)
    assert tiny.metric("lowlat_kv_pages_pinned") >= 9
    for path, ended in (("kept", False), ("kept?cache_salt=mine", True), ("kept?cache_salt=mine", False)):
        answer = tiny.http.delete("/v1/sessions/" + path)
        assert answer.status_code == 200
        assert answer.json() == {"id": "kept", "object": "session.ended", "ended": ended}
    assert tiny.http.delete("/v1/sessions/agent").status_code == 200
    wait_for(lambda: tiny.metric("lowlat_sessions") == 0)
    assert tiny.metric("lowlat_kv_pages_pinned") == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a/b"}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_ttl": 5}, "session_ttl"),
        ({"session_id": "a", "session_ttl": 0}, "session_ttl"),
        ({"session_id": "a", "session_ttl": 60.5}, "session_ttl"),
    ],
)
def test_bad_fields_are_refused(tiny: Live, fields: dict[str, Any], param: str):
    answer = tiny.post("/v1/completions", prompt=[1, 2], **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_bad_names_of_sessions_to_end_are_refused(tiny: Live):
    assert tiny.http.delete("/v1/sessions/a%20b").json()["error"]["param"] == "session_id"
    assert tiny.http.delete("/v1/sessions/a?cache_salt=" + "x" * 257).json()["error"]["param"] == "cache_salt"


def test_a_request_with_nan_fails_alone(tiny: Live):
    with tiny.http.stream("POST", "/v1/completions", json={"prompt": [1, 2], "max_tokens": 200, **LONG}) as other:
        lines = other.iter_lines()
        next(lines)
        failed = tiny.post("/v1/completions", prompt=[5, BROKEN, 6])
        assert failed.status_code == 500
        assert "NaN" in failed.json()["error"]["message"]
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    wait_for(lambda: tiny.metric("lowlat_bad_logits_total") == 1)
    assert tiny.metric('lowlat_sequences_total{finish_reason="error"}') == 1
    assert tiny.state.engine.restarts == 0


def test_a_restart_forgets_sessions(tiny: Live):
    said, _ = turn(tiny, some_tokens(40, 5), session_id="agent")
    wait_for(lambda: tiny.metric("lowlat_sessions") == 1)
    os.kill(tiny.state.engine.pid or 0, signal.SIGKILL)
    wait_for(lambda: tiny.state.engine.restarts == 1 and tiny.http.get("/ready").status_code == 200)
    assert tiny.metric("lowlat_sessions") == 0
    assert turn(tiny, said, session_id="agent")[1] == 0


def test_sessions_in_python(folder: Path):
    crowd = [some_tokens(120, 200 + seed) for seed in range(6)]
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine(model=str(folder), page_size=4, kv_tokens=256, threads=1, low_latency="off", session_ttl=60) as engine:

        def two_turns(seed: int, session: Session | None) -> int:
            prompt = some_tokens(40, seed)
            first = engine.generate(prompt, sampling, session=session)
            for other in crowd:
                engine.generate(other, sampling)
            return engine.generate([*prompt, *first.token_ids, 7], sampling, session=session).usage.cached_tokens

        agent = Session("agent", ttl=30.0, cache_salt="mine")
        assert two_turns(6, None) == 0
        assert two_turns(7, agent) == 44
        assert engine.stats().sessions == 1
        assert engine.end_session(agent)
        assert not engine.end_session(agent)
        assert engine.stats().pages_pinned == 0
        with pytest.raises(ValueError, match="session_ttl_max"):
            engine.generate([1], sampling, session=Session("a", ttl=1e9))


@pytest.mark.parametrize(
    ("form", "to_chat", "fields"),
    [
        (MessagesRequest, messages_requests.to_chat, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
        (ResponsesRequest, responses_requests.to_chat, {"input": "x"}),
    ],
)
def test_other_forms_of_a_chat_carry_the_session_and_whether_to_guess(form: Any, to_chat: Any, fields: dict[str, Any]):
    chat = to_chat(msgspec.convert(fields | {"session_id": "a", "session_ttl": 5.0, "speculate": False}, form))
    assert (chat.session_id, chat.session_ttl, chat.speculate) == ("a", 5.0, False)
