"""Ten thousand connections at once, or as many as the machine allows: each is answered, and none is left over."""

from __future__ import annotations

import os
import resource
import socket

import httpx
import pytest
from server_kit import live_server, wait_for

pytestmark = pytest.mark.slow

CONNECTIONS = 10_000
SPARE = 1_000
"""Files that this process needs beside the two ends of each connection."""


def test_ten_thousand_connections():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(CONNECTIONS, (hard - SPARE) // 2)
    print(f"\n{count} connections")
    with live_server(max_connections=count + SPARE) as live:
        host, port = live.url.removeprefix("http://").split(":")
        files = len(os.listdir("/proc/self/fd"))
        sockets = [socket.create_connection((host, int(port)), timeout=30) for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                head = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
                one.sendall(head[:20] if number % 2 else head)  # every other one stays half
            assert {one.recv(1000)[9:12] for one in sockets[::2]} == {b"200"}
            answer = httpx.post(live.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 2}, timeout=60)
            assert answer.json()["choices"][0]["text"] == "ab"
        finally:
            for one in sockets:
                one.close()
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files + 2, 60)
        assert live.complete(prompt="ab", max_tokens=2)
