"""What uvicorn leaves open on a connection: how large a request's head may be, and how slowly it may come."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
HEAD_TIMEOUT_S = 30.0
"""From a connection's start, or a request's first byte, to the end of the request's head."""


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose request head grows beyond `MAX_HEAD_BYTES` or is not there within `HEAD_TIMEOUT_S`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_there()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")

    def _wait_for_head(self) -> None:
        self._head_is_there()
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
