"""Errors as the OpenAI API writes them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.responses import Response


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    """The field of the request that is wrong, where one is."""
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: Annotated[ErrorDetail, msgspec.Meta(description="What went wrong, and the field that caused it.")]
    type: str = "error"
    """Always `error`; clients of the Messages API look for it."""


class ApiError(Exception):
    """An answer other than success. The message is written for the client: cause first, then the cure."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message=message, type=type, param=param, code=code)
        self.headers: dict[str, str] = {}
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)
        if close:
            # The rest of the body is not read, so the connection cannot be used again.
            self.headers["connection"] = "close"

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        return Response(self.body(), status_code=self.status, media_type="application/json", headers=self.headers)


def bad_field(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unavailable(message: str, *, retry_after: int = 1) -> ApiError:
    return ApiError(503, message, type="server_error", code="unavailable", retry_after=retry_after)


def engine_failed(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="engine_error")


def unexpected() -> ApiError:
    """What a client sees of an error in the server itself: nothing of the inside."""
    return ApiError(500, "the server met an unexpected error; its log has the details", type="server_error")
