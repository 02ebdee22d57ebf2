"""The outermost layer of the server: request ids, API keys, foreign origins, and errors nobody else caught."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import traceback
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lowlat.logs import log_event
from lowlat.server.errors import ApiError, unexpected
from lowlat.server.state import ServerState

_OPEN_PATHS = frozenset({"/health", "/ready"})
"""What a probe may ask without a key; the answers hold no secrets."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Gate:
    """Pure ASGI, because the per-token path runs through it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._keys = [_digest(key) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                simulated = self._state.engine.config.spec_simulate_acceptance
                if simulated is not None:
                    MutableHeaders(scope=message)["x-lowlat-simulated-acceptance"] = f"{simulated:g}"
                if scope.get("lowlat_request_id"):
                    MutableHeaders(scope=message).setdefault("x-request-id", scope["lowlat_request_id"])
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except ApiError as error:
            await error.response()(scope, receive, watched_send)
        except Exception as error:
            log_event(
                "internal_error",
                level=logging.ERROR,
                request_id=scope.get("lowlat_request_id"),
                path=scope["path"],
                error=type(error).__name__,
                # Where, but not the message: it may hold what a client sent.
                where=[f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]],
            )
            # An answer that has begun is left unfinished, which closes its connection.
            if not status:
                await unexpected().response()(scope, receive, watched_send)
        finally:
            if status >= 400:
                self._refused(scope, status, begun)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        chosen = headers.get("x-request-id")
        if chosen is not None:
            if not _REQUEST_ID.fullmatch(chosen):
                raise ApiError(
                    400,
                    "X-Request-Id: 1 to 128 characters out of letters, digits and . _ : - are allowed",
                    param="X-Request-Id",
                )
            scope["lowlat_request_id"] = chosen
        self._check_origin(headers)
        if self._keys and scope["path"] not in _OPEN_PATHS:
            # Clients of the Messages API send their key by itself.
            self._check_key(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")

    def _check_origin(self, headers: Headers) -> None:
        """A web page of another site must not use a server on the user's machine; browsers name the page's origin."""
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host", ""):
            raise ApiError(403, "requests from web pages of other origins are refused", code="foreign_origin")

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        # Every key is compared, each in constant time, so the time says nothing about any of them.
        found = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(
                401,
                "a valid API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                type="authentication_error",
                code="invalid_api_key",
            )

    def _refused(self, scope: Scope, status: int, begun: float) -> None:
        path = scope["path"]
        if path in _OPEN_PATHS or path == "/metrics":
            return
        self._state.metrics.refused[status] += 1
        log_event(
            "refused",
            level=logging.WARNING,
            request_id=scope.get("lowlat_request_id"),
            method=scope["method"],
            path=path[:200],
            status=status,
            seconds=round(time.monotonic() - begun, 6),
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
