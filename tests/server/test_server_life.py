"""What happens around answers: cancelling, ids, leaving clients, full queues, draining."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_kit import PATIENCE_S, held, live_server, wait_for

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
