"""The front's side of the engine: submit, abort, call, and what happens when the engine process hangs or dies.

Supervision, in one place:

- The engine speaks at least once a second. Silence for `heartbeat_timeout` seconds, or requests running without a
  finished step for `watchdog_s` seconds, makes the engine unhealthy. After `watchdog_s` seconds of either it is killed.
- When the process ends, every open request ends with an error output, and the process is started again.
- That happens once: a second end within `restart_window_s` seconds of the restart, or an end before the engine was
  ready, leaves the client failed, with the cause in `health().error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from lowlat.engine.config import EngineConfig
from lowlat.engine.health import EngineState, Health, Pulse
from lowlat.engine.messages import Abort, Call, Event, Failed, Outputs, Ready, Reply, Shutdown, Starting, Stats, Submit
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput
from lowlat.engine.request_stream import RequestStream
from lowlat.engine.stats import EngineStats, add_counters
from lowlat.engine.supervisor import ENGINE_PROGRAM, EngineProcess

log = logging.getLogger("lowlat.engine")

Value = str | int | float | bool | None

_TICK_S = 0.1
_CONNECTING_S = 0.002
_GONE = "the engine has just ended; try again in a moment"


class EngineUnavailableError(Exception):
    """The engine cannot take work now; the text says why."""


class EngineClient:
    """An engine in a process of its own, seen from asyncio. All methods belong to one event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        program: Sequence[str] = ENGINE_PROGRAM,
        heartbeat_timeout: float = 5.0,
        restart_window_s: float = 3600.0,
        on_progress: Callable[[Starting], None] | None = None,
    ) -> None:
        self.config = config
        self.info: Ready | None = None
        """What the engine said when it was last ready."""
        self.stats = EngineStats()
        """The engine's latest gauges; counters include those of engines before a restart."""
        self.restarts = 0
        self.state = EngineState.STARTING
        self._program = program
        self._heartbeat_timeout = heartbeat_timeout
        self._restart_window_s = restart_window_s
        self._on_progress = on_progress
        self._process: EngineProcess | None = None
        self._descriptor = -1
        self._watch: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Value]]] = {}
        self._call_number = 0
        self._earlier = EngineStats()
        self._failure: str | None = None
        self._restarted_at = -restart_window_s
        self._pulse = Pulse(0.0, 0.0)

    # Life

    def spawn(self) -> None:
        """Start the process now; `start` does so itself. Needs no event loop, so imports can go on beside it."""
        if self._process is None:
            self._process = EngineProcess(self.config, self._program)
            now = time.monotonic()
            self._pulse = Pulse(now, now)

    async def start(self) -> None:
        """Start the process if `spawn` has not, and watch it. Returns at once; `wait_ready` waits."""
        self.spawn()
        self._attach()
        self._watch = asyncio.create_task(self._watch_process(), name="engine-watch")

    async def wait_ready(self, timeout: float | None = None) -> Ready:
        """Wait until the engine takes requests.

        Raises:
            EngineUnavailableError: it failed, was closed, or `timeout` seconds have passed.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout)
        if self.state is EngineState.READY and self.info is not None:
            return self.info
        raise EngineUnavailableError(self._why_unavailable())

    async def close(self, grace_s: float = 3.0) -> None:
        """Ask the engine to end, end it after `grace_s` seconds, and end open requests with an error."""
        if self.state is EngineState.CLOSED:
            return
        self.state = EngineState.CLOSED
        if self._watch is not None:
            self._watch.cancel()
        self._end_open("the server is shutting down")
        process = self._detach()
        self._settled.set()
        if process is None:
            return
        if not process.send(Shutdown()):
            grace_s = 0.0  # it has not connected yet, or is gone
        deadline = time.monotonic() + grace_s
        while process.exit_reason() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        process.close()

    def kill(self) -> None:
        """End the process at once, where `close` was not reached: no event loop is needed."""
        self.state = EngineState.CLOSED
        process, self._process = self._process, None
        if process is not None:
            process.close()

    # Work

    def submit(self, *requests: GenerateRequest) -> RequestStream:
        """Send requests to the engine and return the stream of their outputs.

        Raises:
            EngineUnavailableError: the engine is not ready, or is gone; none of the requests is open then.
            ValueError: an id is in use.
        """
        process = self._process
        if self.state is not EngineState.READY or process is None:
            raise EngineUnavailableError(self._why_unavailable())
        taken = [request.id for request in requests if request.id in self._streams]
        if taken:
            raise ValueError(f"request id {taken[0]} is in use")
        stream = RequestStream(request.id for request in requests)
        self._streams.update((request.id, stream) for request in requests)
        if not all(process.send(Submit(request)) for request in requests):
            for request in requests:
                self.abort(request.id)
            raise EngineUnavailableError(_GONE)
        return stream

    def abort(self, id: str, reason: str = "abort") -> bool:
        """End a request: its stream gets a last output at once, the engine frees it after the steps already launched.

        Returns whether the request was open. `reason` is `abort`, or `stop` when a stop string matched in the text.
        """
        stream = self._streams.pop(id, None)
        if stream is None:
            return False
        if self._process is not None:
            self._process.send(Abort(id, reason))
        finish = FinishReason.STOP if reason == "stop" else FinishReason.ABORT
        stream.put(RequestOutput(id=id, token_ids=[], finish_reason=finish), time.monotonic())
        return True

    async def call(
        self, name: str, arguments: dict[str, Value] | None = None, timeout: float = 30.0
    ) -> dict[str, Value]:
        """Have the engine do something between two steps.

        Raises:
            EngineUnavailableError: the engine is not ready, or ended meanwhile.
            RuntimeError: the engine refused; the text is its reason.
            TimeoutError: no answer within `timeout` seconds.
        """
        process = self._process
        if self.state is not EngineState.READY or process is None:
            raise EngineUnavailableError(self._why_unavailable())
        self._call_number += 1
        number = self._call_number
        future: asyncio.Future[dict[str, Value]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            if not process.send(Call(number, name, arguments or {})):
                raise EngineUnavailableError(_GONE)
            return await asyncio.wait_for(future, timeout)
        finally:
            self._calls.pop(number, None)

    def health(self) -> Health:
        """What a probe wants to know, now."""
        return self._pulse.health(
            time.monotonic(),
            self.state,
            self._heartbeat_timeout,
            self.config.watchdog_s,
            restarts=self.restarts,
            failure=self._failure,
        )

    @property
    def open_requests(self) -> int:
        """Requests without a last output."""
        return len(self._streams)

    @property
    def pid(self) -> int | None:
        """The engine process; None while there is none."""
        return self._process.pid if self._process is not None else None

    # Events

    def _attach(self) -> None:
        assert self._process is not None
        self._descriptor = self._process.descriptor
        asyncio.get_running_loop().add_reader(self._descriptor, self._read_events)
        self._read_events()

    def _detach(self) -> EngineProcess | None:
        process, self._process = self._process, None
        if process is not None and self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = -1
        return process

    def _read_events(self) -> None:
        process = self._process
        if process is None:
            return
        limit = 64
        try:
            events = process.events(limit)
        except msgspec.DecodeError as error:
            self._failure = f"the engine sent a message that the front cannot read: {error}"
            process.kill()
            return
        if not events:
            return
        self._pulse.heard_at = now = time.monotonic()
        for event in events:
            if type(event) is Outputs:
                self._deliver(event.items, now)
            else:
                self._note(event, now)
        if len(events) == limit:
            # The descriptor signals new arrivals only: what is still queued needs a turn of its own.
            asyncio.get_running_loop().call_soon(self._read_events)

    def _deliver(self, outputs: list[RequestOutput], now: float) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del streams[output.id]
            stream.put(output, now)

    def _note(self, event: Event, now: float) -> None:
        if isinstance(event, Stats):
            stats = event.stats
            if stats.step + self._earlier.step != self.stats.step or stats.running + stats.waiting == 0:
                self._pulse.progress_at = now
            self.stats = add_counters(stats, self._earlier)
        elif isinstance(event, Starting):
            if self._on_progress is not None:
                self._on_progress(event)
        elif isinstance(event, Ready):
            assert self._process is not None
            self._become_ready(event, self._process)
        elif isinstance(event, Failed):
            self._failure = event.error
        elif isinstance(event, Reply):
            future = self._calls.get(event.number)
            if future is not None and not future.done():
                if event.error is None:
                    future.set_result(event.result)
                else:
                    future.set_exception(RuntimeError(event.error))

    def _become_ready(self, ready: Ready, process: EngineProcess) -> None:
        if process is not self._process:
            return
        if not process.takes_commands:
            asyncio.get_running_loop().call_later(_CONNECTING_S, self._become_ready, ready, process)
            return
        self.info = ready
        self.state = EngineState.READY
        self._failure = None
        self._pulse.progress_at = time.monotonic()
        self._settled.set()
        log.info("engine ready", extra={"fields": {"engine_pid": ready.pid, "seconds": round(ready.ready_s, 2)}})

    # Supervision

    async def _watch_process(self) -> None:
        due = time.monotonic()
        while self.state not in (EngineState.FAILED, EngineState.CLOSED):
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # A late tick means that this process stood still: events may wait unread, so silence proves nothing.
            late, due = now - due > 10 * _TICK_S, now
            process = self._process
            if process is None:
                continue
            if process.exit_reason() is None:
                hang = self._pulse.hang(now, self.config.watchdog_s)
                if self.state is EngineState.READY and not late and hang is not None:
                    self._failure = hang
                    process.kill()
                continue
            self._read_events()
            self._engine_ended(self._failure or process.exit_reason() or "the engine process ended")

    def _engine_ended(self, reason: str) -> None:
        was_ready = self.state is EngineState.READY
        process = self._detach()
        if process is not None:
            process.close()
        now = time.monotonic()
        again = was_ready and now - self._restarted_at >= self._restart_window_s
        self._earlier = self.stats = add_counters(EngineStats(), self.stats)
        self._failure = reason
        self._settled.clear()
        self._end_open(f"the engine ended: {reason}")
        log.error(reason, extra={"fields": {"event": "engine_ended", "restart": again}})
        if not again:
            if self.restarts:
                self._failure = f"{reason}; it had been restarted already and stays down: restart the server"
            self.state = EngineState.FAILED
            self._settled.set()
            return
        self.state = EngineState.RESTARTING
        self.restarts += 1
        self._restarted_at = now
        try:
            self.spawn()
        except OSError as error:
            self._failure = f"{reason}; starting it again failed: {error}"
            self.state = EngineState.FAILED
            self._settled.set()
            return
        self._attach()

    def _end_open(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        now = time.monotonic()
        for id, stream in streams.items():
            stream.put(RequestOutput(id=id, token_ids=[], finish_reason=FinishReason.ERROR, error=reason), now)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailableError(reason))

    def _why_unavailable(self) -> str:
        if self.state is EngineState.STARTING:
            return "the engine is still loading the model"
        if self.state is EngineState.RESTARTING:
            return f"the engine is being restarted ({self._failure})"
        if self.state is EngineState.CLOSED:
            return "the server is shutting down"
        return self._failure or "the engine is not running"
