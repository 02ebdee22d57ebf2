"""What can be done to a server with a bare socket: each abuse is answered or cut off, and the server serves on."""

from __future__ import annotations

import contextlib
import os
import random
import socket

import pytest
from server_kit import live_server, wait_for

BODY = b'{"prompt": "ab", "max_tokens": 100, "stream": true, "ignore_eos": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

ABUSES = {
    "nothing at all": b"",
    "half a request line": b"POST /v1/comp",
    "half a head": POST + b"Content-Le",
    "a head without its body": POST + b"Content-Length: 71\r\n\r\n",
    "half a body": POST + b"Content-Length: 5000\r\n\r\n" + BODY,
    "a body that is too long": POST + b"Content-Length: 9\r\n\r\n" + BODY,
    "a length that is none": POST + b"Content-Length: -5\r\n\r\n" + BODY,
    "a length that is huge": POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "two lengths": POST + b"Content-Length: 71\r\nContent-Length: 3\r\n\r\n" + BODY,
    "length and chunks": POST + b"Content-Length: 71\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "an endless chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n" + b"a" * 5000,
    "a null byte in a header": POST + b"X: a\0b\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "an upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "a path of bytes": b"GET /%ff%fe\xff\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    "many at once, none read": WHOLE * 20,
    "one and then rubbish": WHOLE + b"\r\n\r\n\r\nnonsense\r\n\r\n",
}


@pytest.fixture(scope="module")
def live():
    with live_server({"step_s": 0.005}, body_timeout_s=30.0) as server:
        yield server


def at_rest(live):
    return wait_for(lambda: not live.state.live and live.state.engine.open_requests == live.state.open_sequences == 0)


@pytest.mark.parametrize("abuse", ABUSES)
@pytest.mark.parametrize("how", ["closed at once", "reset", "after an answer"])
def test_a_connection_that_is_abused_ends_and_nothing_stays(live, abuse, how):
    with live.connect() as raw:
        raw.sendall(ABUSES[abuse])
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif how == "after an answer":
            raw.shutdown(socket.SHUT_WR)
            raw.settimeout(0.3)
            with contextlib.suppress(OSError):
                answer = raw.recv(4096)
                assert not answer or answer.startswith(b"HTTP/1.1 ")
                assert b"Traceback" not in answer
                assert b" 500 " not in answer.split(b"\r\n")[0]
    assert at_rest(live)
    assert live.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"


def test_streams_that_are_closed_at_any_byte_leave_no_file_and_no_sequence(live):
    live.complete(prompt="ab", max_tokens=1)
    files = len(os.listdir("/proc/self/fd"))
    rng = random.Random(0)
    for _ in range(30):
        with live.connect() as raw:
            raw.sendall(WHOLE[: rng.randrange(1, len(WHOLE) + 200)])
            raw.settimeout(0.02)
            with contextlib.suppress(OSError):
                raw.recv(rng.randrange(1, 500))
    assert at_rest(live)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files)
    assert live.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"
