"""A scripted server in a process of its own, so that its schedule does not share the client's event loop."""

import json
import os
import pathlib
import subprocess
import sys
import urllib.request

import pytest
import torch

# Tiny random models and drafts are those of the models' and of guessing's tests.
for folder in ("models", "speculative"):
    sys.path.append(str(pathlib.Path(__file__).parents[1] / folder))

SERVER = pathlib.Path(__file__).with_name("scripted_server.py")


class Scripted:
    """A running scripted server."""

    def __init__(self, process, port):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def log(self):
        with urllib.request.urlopen(f"{self.url}/script/log", timeout=120) as response:
            return json.load(response)


@pytest.fixture
def one_thread():
    """PyTorch computes in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def idle_machine(monkeypatch):
    """Notes tell of a busy machine too, and tests run on any."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def scripted():
    """A function that starts a scripted server with the given flags, e.g. `scripted("--itl-ms", "5")`."""
    running = []

    def start(*flags):
        process = subprocess.Popen([sys.executable, str(SERVER), *map(str, flags)], stdout=subprocess.PIPE, text=True)
        running.append(process)
        return Scripted(process, json.loads(process.stdout.readline())["port"])

    yield start
    for process in running:
        process.terminate()
        process.wait(timeout=120)
        process.stdout.close()
