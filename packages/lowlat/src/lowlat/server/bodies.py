"""From bytes on a connection to a checked request struct; everything wrong becomes an error that names the field."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from lowlat.server.errors import ApiError, bad_field
from lowlat.server.field_values import allowed_words
from lowlat.server.requests import ChatRequest, CompletionRequest

Body = TypeVar("Body", CompletionRequest, ChatRequest)
Form = TypeVar("Form", bound=msgspec.Struct)

_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*?)`")
_OTHER_WORD = re.compile(r"Invalid enum value (?P<quote>['\"])(?P<value>.*)(?P=quote)", re.DOTALL)
_DISCARD_S = 2.0
_SHOWN = 64  # characters of what the client sent


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 above `limit` bytes, 408 when it is not complete within `timeout_s` seconds.
        ClientDisconnect: the client went away.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        if "expect" not in request.headers:  # else the client waits for leave to send
            await _discard(request)
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_collect(request, limit), timeout_s)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", close=True) from None


async def _collect(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            if message.get("more_body", False):
                await _discard(request)
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _discard(request: Request) -> None:
    """Read what is left of a body, for a while: a connection that is closed while its client still sends is reset, and
    the answer that the client has not read yet is lost with it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while (message := await request.receive())["type"] == "http.request" and message.get("more_body", False):
                pass


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {limit} bytes", code="body_too_large", close=True)


def decode_struct(data: bytes, form: type[Form]) -> Form:
    """Decode one body of any form.

    Raises:
        ApiError: 400; `param` is the field, such as `temperature` or `messages[0].content`.
    """
    try:
        data.decode()  # not all fields are looked into here
        body: Form = _decoder(form).decode(data)
    except msgspec.ValidationError as error:
        raise _explain(form, str(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain_malformed(data, str(error)) from None
    _refuse_unsupported(body, "")
    return body


def decode_body(data: bytes, form: type[Body]) -> Body:
    """Decode and check the body of a generating route.

    Raises:
        ApiError: 400, as `decode_struct`.
    """
    body = decode_struct(data, form)
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "only allowed with stream: true")
    return body


@functools.cache
def _decoder(form: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


def _explain(form: type[msgspec.Struct], text: str) -> ApiError:
    where = _WHERE.search(text)
    # `[...]` stands for a key that msgspec does not name.
    path = where["path"].replace("[...]", "") if where else ""
    message = _WHERE.sub("", text)
    for pattern, words in ((_UNKNOWN, "is not a field of this request"), (_MISSING, "is required")):
        if found := pattern.search(message):
            name = found["name"][:_SHOWN]
            name = f"{path}.{name}" if path else name
            return bad_field(name, words, code="unknown_field" if pattern is _UNKNOWN else "missing_field")
    if (other := _OTHER_WORD.fullmatch(message)) and (known := allowed_words(form, path)):
        shown = other["quote"] + other["value"][:_SHOWN] + other["quote"]
        return bad_field(path, f"{shown} is not one of {', '.join(map(repr, known))}")
    message = message.replace("`", "")
    message = message[:1].lower() + message[1:]
    return bad_field(path, message) if path else ApiError(400, f"the body is not as expected: {message}")


def _explain_malformed(data: bytes, reason: str) -> ApiError:
    """NaN and Infinity are what JSON libraries write and JSON forbids: name the field that holds one."""

    class NotFinite(float):
        pass

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs)

    try:
        value = json.loads(data, parse_constant=NotFinite, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, NotFinite) or (isinstance(item, dict) and _holds(item, NotFinite)):
                return bad_field(name, "must be finite")
    return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")


def _holds(item: dict[str, Any], kind: type) -> bool:
    return any(isinstance(value, kind) for value in item.values())


@functools.cache
def _no_ops(form: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Unsupported fields of a struct, each with the values that ask for nothing."""
    found = {}
    for field in msgspec.inspect.type_info(form).fields:  # type: ignore[attr-defined]
        extra = field.type.extra if isinstance(field.type, msgspec.inspect.Metadata) else None
        if extra is not None and "no_op" in extra:
            found[field.encode_name] = tuple(msgspec.json.decode(extra["no_op"]))
    return found


def _refuse_unsupported(body: msgspec.Struct, prefix: str) -> None:
    """Looks at a body and at every struct in it."""
    no_ops = _no_ops(type(body))
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in no_ops:
            if value is not None and not any(_same(value, harmless) for harmless in no_ops[name]):
                raise bad_field(f"{prefix}{name}", "this server does not support this option", code="unsupported")
        elif isinstance(value, msgspec.Struct):
            _refuse_unsupported(value, f"{prefix}{name}.")
        elif isinstance(value, list) and not (value and isinstance(value[0], int)):  # token ids may be very many
            for number, item in enumerate(value):
                if isinstance(item, msgspec.Struct):
                    _refuse_unsupported(item, f"{prefix}{name}[{number}].")


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
