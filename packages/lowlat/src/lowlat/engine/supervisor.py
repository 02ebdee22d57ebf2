"""One engine process and the two local sockets that join it to the front."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from lowlat.engine.config import EngineConfig
from lowlat.engine.messages import Command, Event, decode_event, encode

ENGINE_PROGRAM: tuple[str, ...] = (sys.executable, "-m", "lowlat.engine.process")


def engine_program(lines_are_json: bool) -> tuple[str, ...]:
    """The engine's command, whose log lines have the front's form."""
    return (*ENGINE_PROGRAM, "--log-format", "json" if lines_are_json else "text")


# As plain numbers: the library's enumerations cost microseconds for each message.
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)


class EngineProcess:
    """Starts an engine, sends it commands, reads its events.

    The front binds both sockets inside a private directory (mode 0700), so that no other user can reach the engine.
    Every process gets sockets of its own: what a dead engine still had in flight cannot reach its successor's requests.
    """

    def __init__(self, config: EngineConfig, program: Sequence[str] = ENGINE_PROGRAM) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="lowlat-"))
        self._context = zmq.Context(io_threads=1)
        try:
            self._commands = self._bind(zmq.PUSH, "commands")
            self._events = self._bind(zmq.PULL, "events")
            self._process = subprocess.Popen(
                [
                    *program,
                    *("--commands", self._address("commands")),
                    *("--events", self._address("events")),
                    *("--config", msgspec.json.encode(config).decode()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                # A Ctrl-C in the terminal reaches the front alone, which then drains.
                start_new_session=True,
            )
        except BaseException:
            self._release()
            raise

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self._address(name))
        return socket

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """File descriptor that turns readable when events may be waiting; drain with `events` whenever it does."""
        return self._events.getsockopt(zmq.FD)  # type: ignore[return-value]

    @property
    def takes_commands(self) -> bool:
        """Whether the engine is connected for commands; its events may arrive before, over a socket of their own."""
        return bool(self._commands.getsockopt(_EVENTS) & _POLLOUT)  # type: ignore[operator]

    def send(self, command: Command) -> bool:
        """Hand a command over without waiting; False when no engine is connected: not yet, or no longer."""
        try:
            self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def events(self, limit: int = 64) -> list[Event]:
        """Events that have arrived, at most `limit`; fewer than `limit` means that none is left.

        Raises:
            msgspec.DecodeError: the peer does not speak this version's messages.
        """
        found: list[Event] = []
        socket: Any = self._events
        # Asking first is far cheaper than the exception of a receive that finds nothing.
        while len(found) < limit and socket.getsockopt(_EVENTS) & _POLLIN:
            found.append(decode_event(socket.recv(zmq.NOBLOCK)))
        return found

    def exit_reason(self) -> str | None:
        """None while the process lives, else how it ended, in words."""
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"the engine process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the engine process was ended by {name}"

    def kill(self) -> None:
        """End the process at once and collect it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process if it still runs, and give back sockets and directory. May be called twice."""
        self.kill()
        self._release()

    def _release(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def _has_descriptor(stream: object) -> bool:
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):
        return False
