"""Engines that die, hang or start slowly, and what the server says meanwhile."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_kit import held, live_server, standing_still, wait_for

from lowlat.engine.config import EngineConfig

HELD = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True} | held(5)
"""Stands still after five tokens, so that it is caught while it runs."""


def test_a_dead_engine_ends_streams_with_an_error_and_the_next_request_is_served(live):
    first = next(stream := live.stream("/v1/completions", **HELD))
    assert first["choices"][0]["text"].startswith("a")
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(live.post, "/v1/completions", **HELD)
        wait_for(lambda: live.metric("lowlat_running_sequences") == 2)
        os.kill(live.state.engine.pid, signal.SIGKILL)
        rest = list(stream)
        assert "SIGKILL" in rest[-1]["error"]["message"]
        assert "[DONE]" not in rest
        assert whole.result().status_code == 500
        assert whole.result().json()["error"]["code"] == "engine_error"
    # The next request comes while the engine is being restarted, and waits for it.
    assert live.complete(prompt="ab", max_tokens=3)["choices"][0]["text"] == "aba"
    assert live.metric("lowlat_engine_restarts_total") == 1
    wait_for(lambda: live.metric('lowlat_sequences_total{finish_reason="error"}') == 2)
    assert live.http.get("/health").json()["restarts"] == 1


def test_a_second_death_leaves_a_server_that_says_so():
    with live_server(start_wait_s=5.0) as live:
        os.kill(live.state.engine.pid, signal.SIGKILL)
        wait_for(lambda: live.state.engine.restarts == 1 and live.http.get("/ready").status_code == 200)
        os.kill(live.state.engine.pid, signal.SIGKILL)
        wait_for(lambda: "restarted already" in (live.http.get("/health").json()["error"] or ""))
        assert live.http.get("/health").status_code == live.http.get("/ready").status_code == 503
        answer = live.post("/v1/completions", prompt="a")
        assert answer.status_code == 503
        assert "had been restarted already" in answer.json()["error"]["message"]
        assert live.metric("lowlat_engine_alive") == 0


def test_health_notices_a_hung_engine_idle_and_loaded(clock):
    config = EngineConfig(model="fake-model", watchdog_s=1e9)
    with live_server(config=config, heartbeat_timeout=500) as live:
        for loaded in (False, True):
            stream = live.stream("/v1/completions", **HELD) if loaded else None
            if stream is not None:
                next(stream)
            with standing_still(live.state.engine.pid):
                wait_for(lambda: clock.skip(100) or live.http.get("/health").status_code == 503)
                assert live.http.get("/ready").status_code == 503
            wait_for(lambda: live.http.get("/ready").status_code == 200)
            if stream is not None:
                live.release()
                assert list(stream)[-1] == "[DONE]"


def test_alive_before_ready_and_requests_wait_for_the_start(tmp_path):
    gate = tmp_path / "may start"
    with live_server({"start_gate": str(gate)}, wait_ready=False) as live, ThreadPoolExecutor() as pool:
        assert live.http.get("/health").status_code == 200
        assert live.http.get("/health").json()["status"] == "starting"
        assert live.http.get("/ready").status_code == 503
        waits = pool.submit(live.complete, prompt="ab", max_tokens=2)
        with pytest.raises(TimeoutError):
            waits.result(0.2)
        gate.touch()
        assert waits.result()["choices"][0]["text"] == "ab"
    gate.unlink()
    with live_server({"start_gate": str(gate)}, wait_ready=False, start_wait_s=0.2) as live:
        for answer in (live.http.get("/v1/models"), live.post("/v1/completions", prompt="a")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert "loading" in answer.json()["error"]["message"]
        gate.touch()
