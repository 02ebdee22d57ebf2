"""Running the server: uvicorn, signals, draining, and the exit code.

First SIGTERM or SIGINT: new work is refused with 503, open requests get `drain_s` seconds, then the process ends with
exit code 0. A second one ends it at once with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.engine.config import EngineConfig
from lowlat.engine.messages import Ready
from lowlat.engine.supervisor import engine_program
from lowlat.logs import log_event, set_up_logging
from lowlat.server.app import create_admin_app, create_app
from lowlat.server.settings import ServerSettings
from lowlat.server.state import ServerState
from lowlat.server.text_model import TextModel, load_text_model


class StartError(Exception):
    """The server could not start; the text says why."""


class DrainingServer(uvicorn.Server):
    """Keeps listening while it drains, so that late clients get a 503 and not a refused connection."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self.ended_early = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        names = [signal.SIGTERM, signal.SIGINT]
        if threading.current_thread() is not threading.main_thread():
            names = []  # signals belong to the main thread
        for name in names:
            loop.add_signal_handler(name, self._on_signal)
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(name)

    def _on_signal(self) -> None:
        if self._state.draining:
            self.ended_early = True
            self.should_exit = self.force_exit = True
            return
        self.drain()

    def drain(self) -> None:
        """Refuse new work; end when open requests have ended, or after the time for it."""
        self._state.draining = True
        self._drainer = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        state = self._state
        limit = state.settings.drain_s
        log_event("draining", open_requests=len(state.live), seconds=limit)
        deadline = time.monotonic() + limit
        while state.live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        cut = list(state.live)
        if cut:
            log_event("drain_limit_reached", cut_requests=len(cut))
            for request_id in cut:
                state.cancel(request_id)
        self.should_exit = True


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    *,
    engine: EngineClient | None = None,
    load_text: Callable[[], TextModel] | None = None,
    on_ready: Callable[[Ready, str], None] | None = None,
) -> int:
    """Serve until a signal ends it. Returns the exit code: 0, or 1 when a second signal cut the draining short.

    `engine` may have been spawned already. `load_text` reads the tokenizer (in a thread); by default that of
    `config.model`. `on_ready` is called with what the engine says and the server's address.

    Raises:
        StartError: the engine or the tokenizer could not be loaded, or the address is taken.
    """
    program = engine_program(set_up_logging(settings.log_format))
    allow_many_files()
    engine = engine or EngineClient(config, program=program, heartbeat_timeout=settings.heartbeat_timeout_s)
    return _run(_serve(config, settings, engine, load_text, on_ready))


def _run(main: Coroutine[Any, Any, int]) -> int:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return int(uvloop.run(main))


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    engine: EngineClient,
    load_text: Callable[[], TextModel] | None,
    on_ready: Callable[[Ready, str], None] | None,
) -> int:
    def load() -> TextModel:
        return load_text() if load_text is not None else load_text_model(config.model, settings.served_model_name)

    state = ServerState(settings, engine, lambda: asyncio.to_thread(load))
    server = DrainingServer(uvicorn_config(create_app(state), settings), state)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(listen(settings.host, settings.port))
        admin = None
        if settings.admin_port is not None:
            admin = sockets.enter_context(listen(settings.admin_host, settings.admin_port))
            log_event("admin", address=f"http://{settings.admin_host}:{admin.getsockname()[1]}")
        address = f"http://{settings.host}:{listener.getsockname()[1]}"
        await serve_app(server, state, listener, _announce(state, server, address, on_ready), admin)
    return 1 if server.ended_early else 0


async def serve_app(
    server: DrainingServer,
    state: ServerState,
    listener: socket.socket,
    starter: Coroutine[Any, Any, None] | None = None,
    admin: socket.socket | None = None,
) -> None:
    """Start the engine, serve until `server` ends, close the engine. `starter` runs beside it; its error is raised.

    `admin`: a socket for `/metrics` and the admin routes, served as long as the rest.

    Raises:
        StartError: the engine process cannot be started, or what `starter` raises.
    """
    beside = asyncio.ensure_future(starter) if starter is not None else None
    try:
        try:
            await state.start()
        except OSError as error:
            raise StartError(f"the engine process cannot be started: {error}") from error
        async with _admin_server(state, admin):
            await server.serve(sockets=[listener])
    finally:
        await state.engine.close(grace_s=0.0 if server.ended_early else 3.0)
        if beside is not None and not beside.done():
            beside.cancel()
    if beside is not None:
        with contextlib.suppress(asyncio.CancelledError):
            await beside


class _QuietServer(uvicorn.Server):
    """A server beside the main one: signals are the main one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _admin_server(state: ServerState, listener: socket.socket | None) -> AsyncIterator[None]:
    if listener is None:
        yield
        return
    server = _QuietServer(uvicorn_config(create_admin_app(state), state.settings))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=_protocol(),
        ws="none",
        backlog=2048,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )


def _protocol() -> Any:
    """The bounded protocol over httptools; without httptools, h11, which bounds heads itself and costs more."""
    try:
        from lowlat.server.protocol import BoundedProtocol
    except ImportError:
        return "h11"
    return BoundedProtocol


def allow_many_files() -> None:
    """Every connection is an open file: raise the soft limit to what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartError when the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another with --port or --host"
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def _announce(
    state: ServerState,
    server: DrainingServer,
    address: str,
    on_ready: Callable[[Ready, str], None] | None,
) -> None:
    """Wait for the first readiness; a failure before it ends the server.

    Raises:
        StartError: the engine or the tokenizer could not be loaded.
    """
    while not server.started and not server.should_exit:
        await asyncio.sleep(0.01)
    try:
        await state.text()
        ready = await state.engine.wait_ready()
    except (EngineUnavailableError, ValueError, OSError) as error:
        if state.draining:
            return
        server.should_exit = True
        raise StartError(str(error)) from error
    log_event(
        "ready",
        model=ready.model,
        address=address,
        dtype=ready.dtype,
        device=ready.device,
        kernels=ready.kernels,
        spec=state.engine.config.spec,
        simulated_acceptance=state.engine.config.spec_simulate_acceptance,
        kv_tokens=ready.kv_tokens,
        engine_seconds=round(ready.ready_s, 2),
    )
    if on_ready is not None:
        on_ready(ready, address)
