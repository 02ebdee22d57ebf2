"""What strangers may do and see: keys, ports, other origins, raw sockets, thousands of connections, errors, logs."""

import contextlib

import httpx
import pytest
from server_kit import live_server, wait_for


def idle(live):
    return wait_for(
        lambda: (
            live.metric("lowlat_running_sequences") == 0
            and live.metric("lowlat_waiting_sequences") == 0
            and live.metric('lowlat_kv_pages{state="held"}') == 0
            and live.metric("lowlat_open_requests") == 0
        )
    )


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
