"""The server as a process: signals, exit codes, log lines, and engines that do not start."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from server_kit import PATIENCE_S, held, wait_for

BODY = {"prompt": "secret words", "max_tokens": 100, "ignore_eos": True, "stream": True}


class Process:
    def __init__(self, **script):
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fake_serve.py"))],
            stderr=subprocess.PIPE,
            env=os.environ | {"FAKE_ENGINE": json.dumps(script)},
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    def event(self, name):
        parsed = (json.loads(line) for line in self.lines if line.startswith("{"))
        return next((line for line in parsed if line["event"] == name), None)

    def ready(self):
        wait_for(lambda: self.event("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.lines
        return self.event("ready")["address"]

    def wait(self):
        code = self.process.wait(PATIENCE_S)
        self.reader.join()
        return code


def test_a_signal_drains_and_a_second_one_ends_at_once():
    server = Process()
    url = server.ready()
    with httpx.stream("POST", url + "/v1/completions", json=BODY | held(), timeout=PATIENCE_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.event("draining"))
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 1
    assert not any("Traceback" in line for line in server.lines)


def test_ctrl_c_at_idle_ends_with_code_0_and_logs_hold_no_text():
    server = Process()
    url = server.ready()
    answer = httpx.post(url + "/v1/completions", json=BODY | {"stream": False}, headers={"X-Request-Id": "r7"})
    assert "secret" in answer.json()["choices"][0]["text"]
    engine = server.event("engine ready")["engine_pid"]
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert not Path(f"/proc/{engine}").exists()
    assert server.event("request")["request_id"] == "r7"
    assert all(line.startswith("{") for line in server.lines), server.lines
    assert not any("secret" in line for line in server.lines)


def test_an_engine_that_fails_to_start_ends_the_server_with_its_reason():
    server = Process(fail_start="no memory for weights: choose a smaller model")
    assert server.wait() == 1
    assert server.lines[-1] == "error: no memory for weights: choose a smaller model"
