"""A lowlat server of our own for a benchmark: started on a free port, waited for, and always ended."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

SERVE = (sys.executable, "-m", "lowlat.cli.main", "serve")


class ServerStartError(RuntimeError):
    """The server did not become ready; the text ends with the last lines it said."""


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of localhost that Linux gives to nobody who asks for any port, until the block ends.

    A server that allows its address to be reused (SO_REUSEADDR), as servers do, can listen on it inside the block.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere nobody else could listen on it
            holder.close()
        yield port


class LocalServer:
    """One running server: its address, and counters that it reports."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: pathlib.Path, ready_s: float) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.ready_s = ready_s

    def low_latency_steps(self) -> dict[str, float]:
        """Steps by path (`plugin`, `general`) since the start; empty where the server counts none."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            for line in response.read().decode().splitlines():
                if line.startswith("lowlat_low_latency_steps_total{"):
                    labels, _, value = line.rpartition(" ")
                    path = labels.partition('path="')[2].partition('"')[0]
                    found[path] = found.get(path, 0.0) + float(value)
        return found


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: pathlib.Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def local_server(
    arguments: Sequence[str], *, start_s: float = 900.0, command: Sequence[str] = SERVE
) -> Iterator[LocalServer]:
    """Run `lowlat serve ARGUMENTS` on a free port of localhost until the block ends.

    `command` may name another server that takes `--port`. Raises ServerStartError where it ends early or is not ready
    within `start_s` seconds.
    """
    with local_servers([arguments], start_s=start_s, command=command) as (server,):
        yield server


@contextlib.contextmanager
def local_servers(
    arguments: Sequence[Sequence[str]], *, start_s: float = 900.0, command: Sequence[str] = SERVE
) -> Iterator[list[LocalServer]]:
    """The same for several servers that start side by side; all end with the block, also where one does not start."""
    with ended_by_signals(), contextlib.ExitStack() as stack:
        starting = [stack.enter_context(_started(each, command)) for each in arguments]
        yield [server.ready(start_s) for server in starting]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that closes, unwind this process as Ctrl-C does: otherwise it would end
    without ending the server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    before = [(number, signal.signal(number, unwind)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Starting:
    """A server whose process runs and that may not answer yet."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.began = time.monotonic()

    def ready(self, start_s: float) -> LocalServer:
        """Wait until it answers."""
        while not _answers(self.url):
            if self.process.poll() is not None:
                raise ServerStartError(f"the server ended with code {self.process.returncode}:\n{_tail(self.log)}")
            if time.monotonic() - self.began > start_s:
                raise ServerStartError(f"the server was not ready within {start_s:g} s:\n{_tail(self.log)}")
            time.sleep(0.1)
        return LocalServer(self.url, self.process, self.log, time.monotonic() - self.began)


@contextlib.contextmanager
def _started(arguments: Sequence[str], command: Sequence[str]) -> Iterator[_Starting]:
    with reserved_port() as port, tempfile.TemporaryDirectory(prefix="lowlat-bench-") as folder:
        log = pathlib.Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments, "--port", str(port)], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
                env=os.environ.copy(), start_new_session=True,
            )  # fmt: skip
        try:
            yield _Starting(f"http://127.0.0.1:{port}", process, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to the process group where that was not enough."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
