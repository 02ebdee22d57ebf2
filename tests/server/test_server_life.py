"""What happens around answers: cancelling, leaving clients, full queues, dead and hung engines, keys, raw sockets."""

import contextlib
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_kit import PATIENCE_S, held, live_server, standing_still, wait_for

from lowlat.engine.config import EngineConfig

LONG = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True}
HELD = LONG | held(5)
"""Stands still after five tokens, so that it is caught while it runs."""


def idle(live):
    return wait_for(
        lambda: (
            live.metric("lowlat_running_sequences") == 0
            and live.metric("lowlat_waiting_sequences") == 0
            and live.metric('lowlat_kv_pages{state="held"}') == 0
            and live.metric("lowlat_open_requests") == 0
        )
    )


def made(live):
    """Tokens that the engine has made; the front has them too."""
    return live.state.engine.stats.generated_tokens


def test_cancel_by_id_ends_the_stream_and_is_idempotent(live):
    stream = live.stream("/v1/completions", **HELD, request_id="mine.1")
    first = next(stream)
    assert first["id"] == "cmpl-mine.1"
    answer = live.http.delete("/v1/requests/mine.1")
    assert (answer.status_code, answer.json()["cancelled"]) == (200, True)
    rest = list(stream)
    assert rest[-1] == "[DONE]"
    assert rest[-2]["choices"][0]["finish_reason"] == "abort"
    assert len(rest) <= 6
    again = live.http.delete("/v1/requests/mine.1")
    assert (again.status_code, again.json()["cancelled"]) == (200, False)
    assert live.http.delete("/v1/requests/never-was").json()["cancelled"] is False
    assert idle(live)


def test_cancel_takes_the_id_of_an_answer_too_and_ends_all_choices(live):
    stream = live.stream("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=3, **held())
    first = next(stream)
    assert live.http.delete(f"/v1/requests/{first['id']}").json()["cancelled"] is True
    reasons = [
        (choice["index"], choice["finish_reason"])
        for event in list(stream)[:-1]
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(reasons) == [(0, "abort"), (1, "abort"), (2, "abort")]
    assert idle(live)


@pytest.mark.parametrize("options", [{}, {"logprobs": 2, "echo": True, "prompt_logprobs": 1}])
def test_a_cancelled_answer_that_is_not_streamed_has_the_text_so_far(live, options):
    before = made(live)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(live.complete, **HELD, **options, request_id="whole")
        wait_for(lambda: made(live) == before + 5)
        assert live.http.delete("/v1/requests/whole").json()["cancelled"]
        answer = future.result()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] == 5
    echoed = 3 if options else 0
    assert len(answer["choices"][0]["text"]) == 5 + echoed


def test_a_live_id_is_refused_and_free_afterwards(live):
    stream = live.stream("/v1/completions", **HELD, request_id="twice")
    next(stream)
    for headers, body in (({}, {"request_id": "twice"}), ({"X-Request-Id": "twice"}, {})):
        second = live.http.post("/v1/completions", json={"prompt": "x", **body}, headers=headers)
        assert second.status_code == 409
        assert second.json()["error"]["param"] == "request_id"
    live.http.delete("/v1/requests/twice")
    # The engine may still be busy with the first one: its ids are private, so the public one can be used at once.
    list(stream)
    again = live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "request_id": "twice"})
    assert again.status_code == 200
    assert again.headers["x-request-id"] == "twice"
    assert again.json()["id"] == "cmpl-twice"


def test_ids_in_header_and_body_must_agree(live):
    answer = live.http.post("/v1/completions", json={"prompt": "x", "request_id": "a"}, headers={"X-Request-Id": "b"})
    assert answer.status_code == 400
    bad = live.http.get("/v1/models", headers={"X-Request-Id": "no spaces"})
    assert bad.status_code == 400
    assert live.http.get("/v1/models", headers={"X-Request-Id": "r-1"}).headers["x-request-id"] == "r-1"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(live, stream):
    before, aborted = made(live), live.state.engine.stats.aborted
    messages = [{"role": "user", "content": "abc"}]
    with live.send("/v1/chat/completions", messages=messages, stream=stream, **held()):
        wait_for(lambda: made(live) == before + 5)
    wait_for(lambda: live.state.engine.stats.aborted == aborted + 1)
    assert idle(live)


def test_a_client_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr("lowlat.server.responses.SEND_TIMEOUT_S", 0.3)
    script = {"step_s": 0.0, "max_context": 10**6}
    body = {"prompt": "abc", "max_tokens": 900_000, "stream": True, "logprobs": 20}
    with live_server(script) as live, live.send("/v1/completions", **body) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_for(lambda: live.metric("lowlat_open_requests") == 1)
        assert idle(live)
        assert live.metric('lowlat_sequences_total{finish_reason="abort"}') == 1


def test_gauges_and_counters_after_many_clients_left_at_once():
    with live_server(config=EngineConfig(model="fake-model", max_batch=8)) as live:
        sockets = [live.send("/v1/completions", **HELD, stream=True) for _ in range(100)]
        wait_for(lambda: live.metric("lowlat_waiting_sequences") == 92 and made(live) == 8 * 5)
        assert live.metric("lowlat_running_sequences") == 8
        assert live.metric("lowlat_open_requests") == 100
        for one in sockets:
            one.close()
        assert idle(live)
        assert live.metric('lowlat_sequences_total{finish_reason="abort"}') == 100
        assert live.metric("lowlat_request_seconds_count") == 100
        # Whoever waited to the end had no first token; the rest had one.
        assert 8 <= live.metric("lowlat_first_token_seconds_count") < 100
        assert live.state._sequences == 0


def test_a_full_queue_is_a_429_with_retry_after():
    config = EngineConfig(model="fake-model", max_batch=2)
    with live_server(config=config, max_queue=2) as live, ThreadPoolExecutor() as pool:
        streams = [live.stream("/v1/completions", **HELD) for _ in range(2)]
        for stream in streams:
            next(stream)
        assert live.post("/v1/completions", prompt="a", n=5).status_code == 400
        refused = live.post("/v1/completions", prompt="a", n=3)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert live.metric('lowlat_refused_requests_total{status="429"}') == 1
        queued = pool.submit(live.complete, prompt="a", n=2, max_tokens=1)
        wait_for(lambda: live.state.open_sequences == 4)
        live.release()
        assert queued.result()
        for stream in streams:
            stream.close()
        assert idle(live)
        assert live.complete(prompt="a", n=4, max_tokens=1)


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


def test_draining_finishes_streams_and_refuses_new_work():
    with live_server(drain_s=PATIENCE_S) as live:
        stream = live.stream("/v1/completions", **HELD)
        next(stream)
        live.on_loop(live.server.drain)
        # Another connection: the listening socket is still there.
        refused = httpx.post(live.url + "/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert httpx.get(live.url + "/ready").status_code == 503
        assert httpx.get(live.url + "/health").status_code == 200
        live.release()
        rest = list(stream)
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        wait_for(lambda: live.server.should_exit)


def test_draining_cuts_streams_at_its_limit():
    with live_server(drain_s=0.2) as live:
        stream = live.stream("/v1/completions", **HELD)
        next(stream)
        live.on_loop(live.server.drain)
        rest = list(stream)
        assert rest[-2]["choices"][0]["finish_reason"] == "abort"


def test_keys_are_needed_everywhere_but_for_probes():
    with live_server(api_keys=("secret-1", "secret-2")) as live:
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert live.http.get(path).status_code == 401
        for key in ("", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "Bearer secret-1 x"):
            assert live.http.get("/v1/models", headers={"Authorization": key}).status_code == 401
        refused = live.post("/v1/completions", prompt="a")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert "secret" not in refused.text
        for path in ("/health", "/ready"):
            assert live.http.get(path).status_code == 200
        for key in ("secret-1", "secret-2"):
            headers = {"Authorization": f"Bearer {key}"}
            assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_metrics_and_admin_routes_on_a_port_of_their_own():
    with live_server(admin_port=0, api_keys=("k",)) as live:
        keys = {"Authorization": "Bearer k"}
        for path in ("/metrics", "/v1/admin/low-latency"):
            assert live.http.get(path, headers=keys).status_code == 404
            assert httpx.get(live.admin_url + path).status_code == 401
            assert httpx.get(live.admin_url + path, headers=keys).status_code != 404
        assert "lowlat_steps_total" in httpx.get(live.admin_url + "/metrics", headers=keys).text
        assert httpx.get(live.admin_url + "/ready").status_code == 200
        assert httpx.post(live.admin_url + "/v1/completions", headers=keys).status_code == 404
        assert live.http.get("/v1/models", headers=keys).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(live.admin_url + "/ready")


def test_refused_methods_name_those_that_are_allowed(live):
    answer = live.http.request("PATCH", "/v1/admin/low-latency")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, POST"


def test_web_pages_of_other_origins_are_refused(live):
    body = {"prompt": "a", "max_tokens": 1}
    foreign = live.http.post("/v1/completions", json=body, headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    assert live.http.post("/v1/completions", json=body, headers={"Origin": live.url}).status_code == 200


def test_unexpected_errors_show_nothing_of_the_inside(live, monkeypatch):
    def broken(*_):
        raise RuntimeError("inner secret")

    monkeypatch.setattr(live.state, "check_room", broken)
    answer = live.post("/v1/completions", prompt="a")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_log_lines_carry_the_request_id_and_no_text(live, caplog):
    def is_its_line(record):
        return record.getMessage() == "request" and record.fields["request_id"] == "logged"

    with caplog.at_level("INFO", logger="lowlat"):
        live.complete(prompt="topsecret", max_tokens=4, request_id="logged")
        record = wait_for(lambda: next(filter(is_its_line, caplog.records), None))
    assert record.fields["completion_tokens"] == 4
    assert not any("topsecret" in str(vars(record)) for record in caplog.records)


def test_raw_socket_abuse_leaves_the_server_serving(live):
    half = [live.connect() for _ in range(20)]
    for one in half:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
    garbage = live.connect()
    garbage.sendall(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
    assert garbage.recv(200).startswith(b"HTTP/1.1 400")
    body = b'{"prompt": "ab", "max_tokens": 2}'
    one = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    pipelined = live.connect()
    pipelined.sendall(one * 3)
    answers = b""
    while answers.count(b'"finish_reason"') < 3:
        answers += pipelined.recv(65536)
    assert answers.count(b"200 OK") == 3
    assert live.complete(prompt="ab", max_tokens=2)
    for each in (*half, garbage, pipelined):
        each.close()
    assert idle(live)


def test_heads_that_are_slow_or_endless_are_cut_off(monkeypatch):
    with live_server() as live:
        kept = live.connect()
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b"progress_age_s" not in answer:
            answer += kept.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        endless = live.connect()
        endless.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000)
        answer = b""
        while data := endless.recv(1000):
            answer += data
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"too large" in answer
        # The second request of a connection is bound by the same rule.
        with monkeypatch.context() as patch:
            patch.setattr("lowlat.server.protocol.HEAD_TIMEOUT_S", 0.2)
            slow = live.connect()
            for one in (slow, kept):
                with contextlib.suppress(ConnectionError):  # cut off before all was said
                    one.sendall(b"GET /health HTTP/1.1\r\nHo")
                    assert one.recv(100) == b""
        assert live.complete(prompt="ab", max_tokens=2)
        for one in (slow, endless, kept):
            one.close()


def test_a_thousand_connections_at_once_leave_the_server_serving():
    with live_server(max_connections=500) as live:
        sockets = [live.connect() for _ in range(1000)]
        for one in sockets:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        statuses = {one.recv(1000)[9:12] for one in sockets}
        # Above the limit of connections each is told so.
        assert statuses <= {b"200", b"503"}
        assert b"503" in statuses
        for one in sockets:
            one.close()
        wait_for(lambda: httpx.get(live.url + "/ready").status_code == 200)
        assert httpx.post(live.url + "/v1/completions", json={"prompt": "ab"}).status_code == 200


def test_many_streams_at_once_each_get_their_own_text():
    config = EngineConfig(model="fake-model", max_batch=64)
    with live_server({"step_s": 0.002}, config=config) as live, ThreadPoolExecutor(16) as pool:
        texts = [f"text {n:03d}" for n in range(64)]

        def run(text):
            events = live.events("/v1/completions", prompt=text, max_tokens=2 * len(text))
            return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])

        assert list(pool.map(run, texts)) == [text * 2 for text in texts]
        assert idle(live)
        assert threading.active_count() < 60
