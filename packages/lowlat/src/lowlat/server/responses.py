"""Answers while the client may go away: server-sent events, and whole answers. Both cancel when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lowlat.server.errors import ApiError
from lowlat.server.live import LiveRequest

SEND_TIMEOUT_S = 60.0
"""Seconds after which a client that does not read its stream is cut off."""


class AnswerResponse(Response):
    """Runs a generation and sends what it brings.

    The status line goes out with the first bytes, so an error before them still has a status of its own.
    """

    def __init__(
        self,
        generation: LiveRequest,
        chunks: AsyncIterator[bytes],
        release: Callable[[LiveRequest], None],
        *,
        streamed: bool,
    ) -> None:
        """`chunks`: parts of the body; for an answer that is not streamed exactly one."""
        super().__init__(media_type="text/event-stream; charset=utf-8" if streamed else "application/json")
        del self.headers["content-length"]
        self.headers["x-request-id"] = generation.public_id
        if streamed:
            self.headers["cache-control"] = "no-cache"
            # Asks reverse proxies not to collect chunks.
            self.headers["x-accel-buffering"] = "no"
        self._generation = generation
        self._chunks = chunks
        self._release = release
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(scope, receive, send) if self._streamed else self._whole(scope, receive, send))
        finally:
            watcher.cancel()
            with contextlib.suppress(Exception):
                await self._chunks.aclose()  # type: ignore[attr-defined]
            self._release(self._generation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await anext(self._chunks)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self.headers["content-length"] = str(len(body))
        await send(self._start())
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        guard = SendGuard(SEND_TIMEOUT_S)
        try:
            async for chunk in self._chunks:
                if not started:
                    await send(self._start())
                    started = True
                guard.begun += 1
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                guard.done += 1
        except ApiError as error:
            if not started:
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})
            return
        except asyncio.CancelledError:
            if not guard.expired:
                raise
            # Leaving the answer unfinished closes the connection.
            raise ClientDisconnect from None
        finally:
            guard.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> dict[str, Any]:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}


class SendGuard:
    """Cancels the task that made it when one send takes longer than `limit_s` seconds (twice that at most).

    A timer looks now and then whether the same send is still under way: far cheaper than a timeout around each send.
    """

    def __init__(self, limit_s: float) -> None:
        self.begun = 0
        """Sends begun, and done: their owner counts both."""
        self.done = 0
        self.expired = False
        self._limit_s = limit_s
        self._seen = 0
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._look)

    def _look(self) -> None:
        if self.begun > self.done and self.begun == self._seen:
            self.expired = True
            self._task.cancel()
            return
        self._seen = self.begun
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)

    def end(self) -> None:
        """Stop looking."""
        self._timer.cancel()


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")
