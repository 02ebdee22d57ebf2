"""Simulated acceptance over HTTP: every response says so, and no request can ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_kit import Live, live_server

from lowlat.cli.remote import remote_answer
from lowlat.engine.config import SIMULATED, EngineConfig
from lowlat.engine.request import SamplingParams

HEADER = "x-lowlat-simulated-acceptance"
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}


@pytest.fixture(scope="module")
def simulating() -> Iterator[Live]:
    config = EngineConfig(model="fake-model", spec="ngram", spec_simulate_acceptance=3.51)
    with live_server(config=config) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_every_answer_says_so(simulating: Live, path: str, stream: bool):
    reply = simulating.post(path, **BODIES[path], stream=stream)
    assert (reply.status_code, reply.headers.get(HEADER)) == (200, "3.51")


def test_so_does_all_else(simulating: Live):
    assert simulating.post("/v1/completions", prompt=3).headers[HEADER] == "3.51"
    assert simulating.http.get("/v1/nowhere").headers[HEADER] == "3.51"
    assert simulating.http.get("/v1/info").json()["simulated_acceptance"] == 3.51
    assert simulating.metric("lowlat_simulated_acceptance") == 3.51


def test_so_does_a_chat_with_such_a_server(simulating: Live, live: Live, capsys: pytest.CaptureFixture[str]):
    for server, said in ((simulating, f"[{SIMULATED}]\n"), (live, "")):
        assert list(remote_answer(server.url, SamplingParams(max_tokens=3), None)(MESSAGES))
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("path", BODIES)
def test_no_request_can_ask_for_it(live: Live, path: str):
    reply = live.post(path, **BODIES[path])
    assert (reply.status_code, HEADER in reply.headers) == (200, False)
    for name in ("spec_simulate_acceptance", "simulate_acceptance"):
        reply = live.post(path, **BODIES[path], **{name: 3.51})
        assert reply.status_code == 400
        assert name in reply.text
    assert live.http.get("/v1/info").json()["simulated_acceptance"] is None
    assert live.metric("lowlat_simulated_acceptance") == 0
