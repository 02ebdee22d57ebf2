"""The engine process: takes commands, turns the engine's loop, sends events.

Started by the front as `python -m lowlat.engine.process --commands ADDRESS --events ADDRESS --config JSON`.
"""

from __future__ import annotations

import time

_STARTED = time.monotonic()  # before the imports below: they take seconds, and count as start-up

import argparse  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402

import msgspec  # noqa: E402
import zmq  # noqa: E402

from lowlat.engine.build import EngineFacts, SetupError, build_engine  # noqa: E402
from lowlat.engine.config import EngineConfig  # noqa: E402
from lowlat.engine.core import EngineCore  # noqa: E402
from lowlat.engine.executor import ExecutorError  # noqa: E402
from lowlat.engine.messages import (  # noqa: E402
    Abort,
    Call,
    Command,
    Event,
    Failed,
    Outputs,
    Ready,
    Reply,
    Shutdown,
    Starting,
    Stats,
    Submit,
    decode_command,
    encode,
)
from lowlat.engine.request import FinishReason, RequestOutput  # noqa: E402
from lowlat.grammars.grammar import Grammar, GrammarError, GrammarsBusyError  # noqa: E402
from lowlat.logs import set_up_logging  # noqa: E402
from lowlat.models.config import UnsupportedModelError  # noqa: E402
from lowlat.models.loading.errors import CheckpointError  # noqa: E402

log = logging.getLogger("lowlat.engine")

_HEARTBEAT_S = 0.25
_STATS_S = 1.0
_PROGRESS_S = 0.1
_REST_S = 5.0
"""Idle time after which freed memory goes back to the system; not at once, since the next request may want it."""


class EngineLoop:
    """Joins an `EngineCore` to the sockets of the front."""

    def __init__(self, core: EngineCore, commands: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        self._core = core
        self._commands = commands
        self._events = events
        self._stop = False
        self._stats_at = 0.0
        self._parent = os.getppid()
        self.front_is_gone = False

    def run(self) -> None:
        """Serve until `Shutdown`, or until the front is gone. Raises `ExecutorError` when a step fails."""
        idle = False
        rested_at = 0.0
        while not self._stop:
            self._take_commands()
            if self._core.has_work:
                outputs = self._core.turn(_HEARTBEAT_S)
                idle = False
            else:
                outputs = self._core.turn()
                if not idle:
                    self._stats_at = 0.0  # gauges must show at once that nothing runs any more
                    rested_at = time.monotonic() + _REST_S
                elif rested_at and time.monotonic() > rested_at:
                    rested_at = 0.0
                    give_back_memory()
                idle = True
            if outputs:
                if not self._core.has_requests:
                    self._report()  # first, so that whoever has the last answer finds it counted
                self._send(Outputs(outputs))
            self._heartbeat()
            if idle:
                self._commands.poll(int(_HEARTBEAT_S * 1000))

    def _take_commands(self) -> None:
        while True:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._do(decode_command(message))

    def _do(self, command: Command) -> None:
        if isinstance(command, Submit):
            try:
                self._core.submit(command.request)
            except ValueError as error:
                refused = RequestOutput(command.request.id, [], finish_reason=FinishReason.ERROR, error=str(error))
                self._send(Outputs([refused]))
        elif isinstance(command, Abort):
            self._core.abort(command.id, FinishReason.STOP if command.reason == "stop" else FinishReason.ABORT)
        elif isinstance(command, Call) and command.name == "grammar":
            self._ask(command)
        elif isinstance(command, Call):
            self._send(self._call(command))
        elif isinstance(command, Shutdown):
            self._stop = True

    def _ask(self, command: Call) -> None:
        """Whether a grammar can be followed; answered when that is known, perhaps some steps later."""
        grammar = msgspec.convert([command.arguments["kind"], command.arguments["text"]], Grammar)

        def answer(error: GrammarError | None) -> None:
            text = None if error is None else str(error)
            self._send(Reply(command.number, {"error": text, "busy": isinstance(error, GrammarsBusyError)}))

        try:
            self._core.ask(grammar, answer)
        except ValueError as error:
            self._send(Reply(command.number, error=str(error)))

    def _call(self, command: Call) -> Reply:
        if command.name == "end-session":
            id, salt = str(command.arguments["id"]), str(command.arguments["salt"])
            ended = self._core.end_session(id, salt)
            self._stats_at = 0.0
            return Reply(command.number, {"ended": ended})
        low = self._core.low_latency
        if command.name != "low-latency" or low is None:
            return Reply(command.number, error=f"the engine knows no call {command.name!r}")
        on = command.arguments.get("on")
        if isinstance(on, bool):
            low.switch(on)  # the plans of later steps carry it to all ranks
        return Reply(command.number, {"report": msgspec.json.encode(low.report()).decode()})

    def _report(self) -> None:
        self._stats_at = time.monotonic()
        self._send(Stats(self._core.stats(), self._stats_at))

    def _heartbeat(self) -> None:
        if time.monotonic() - self._stats_at < _STATS_S:
            return
        self._report()
        if os.getppid() != self._parent:
            log.warning("the front is gone: the engine ends")
            self._events.setsockopt(zmq.LINGER, 0)  # nobody will read what is still queued
            self._stop = self.front_is_gone = True

    def _send(self, event: Event) -> None:
        self._events.send(encode(event))


def give_back_memory() -> None:
    """Return to the system what the C library keeps of freed memory, where it can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def remove_sockets(*addresses: str) -> None:
    """Remove what a front that was killed left behind: its sockets and the folder that holds nothing else."""
    for path in (Path(address.removeprefix("ipc://")) for address in addresses):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def serve(config: EngineConfig, commands_address: str, events_address: str) -> int:
    """Build an engine and serve it; returns the process's exit code."""
    context = zmq.Context()
    commands: zmq.Socket[bytes] = context.socket(zmq.PULL)
    events: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    for socket, address in ((commands, commands_address), (events, events_address)):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(address)
    core: EngineCore | None = None
    try:
        core, facts, _ = build_engine(config, _ProgressSender(events))
        # What start-up made lives as long as the process: the collector need not look at it in every pass.
        gc.collect()
        gc.freeze()
        events.send(encode(_ready(facts)))
        loop = EngineLoop(core, commands, events)
        loop.run()
        if loop.front_is_gone:
            remove_sockets(commands_address, events_address)
        return 0
    except (SetupError, CheckpointError, UnsupportedModelError) as error:
        events.send(encode(Failed(str(error))))
    except ExecutorError as error:
        log.exception("a step failed")
        events.send(encode(Failed(f"a step failed: {error}")))
    except Exception as error:
        log.exception("the engine failed")
        events.send(encode(Failed(f"{type(error).__name__}: {error}")))
    finally:
        if core is not None:
            core.close()
        context.destroy()
    return 1


class _ProgressSender:
    """Sends progress at most ten times a second, and every change of phase."""

    def __init__(self, events: zmq.Socket[bytes]) -> None:
        self._events = events
        self._last: tuple[str, float] = ("", 0.0)

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        phase, at = self._last
        if what != phase or now - at > _PROGRESS_S or done == total:
            self._last = (what, now)
            self._events.send(encode(Starting(what, done, total)))


def _ready(facts: EngineFacts) -> Ready:
    return Ready(
        pid=os.getpid(),
        model=facts.model,
        vocab_size=facts.vocab_size,
        max_context=facts.max_context,
        dtype=facts.dtype,
        device=facts.device,
        kv_tokens=facts.kv_tokens,
        page_size=facts.page_size,
        kernels=facts.kernels,
        ready_s=time.monotonic() - _STARTED,
        item_tokens=facts.item_tokens,
    )


def main() -> None:
    """Entry of the engine process."""
    parser = argparse.ArgumentParser(description="the engine process; started by the front")
    for name in ("--commands", "--events", "--config"):
        parser.add_argument(name, required=True)
    parser.add_argument("--log-format", choices=("json", "text"), default="text")
    arguments = parser.parse_args()
    set_up_logging(arguments.log_format)
    # oneDNN keeps compiled code and buffers, about half a megabyte, for every shape that it met: by default 1,024 of
    # them, and each number of rows in a step is a shape of its own.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # The front decides when to end; a Ctrl-C in the terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    raise SystemExit(serve(config, arguments.commands, arguments.events))


if __name__ == "__main__":
    main()
