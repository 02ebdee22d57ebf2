"""A streaming client that only takes times while a stream runs, and reads what the chunks said afterwards.

A chunk's time is taken when its bytes leave the socket; JSON is parsed once the stream has ended. Parsing between two
chunks would delay the second one's time stamp on a busy core.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any

import msgspec

from lowlat.bench.load import usage
from lowlat.bench.load.records import Record

try:
    import httpx
except ImportError as error:
    raise ImportError("loads over HTTP need httpx: pip install 'lowlat[bench]'") from error

MODELS_FORM = '{"data": [{"id": "NAME", ...}, ...]}'


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    error: _Error | None = None


class Card(msgspec.Struct):
    """A model as a server lists it. What the server says beside its name may be of any type."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    owned_by: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[Card]


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    known = url.scheme in ("http", "https") and bool(re.fullmatch(r"[\w.:-]+", url.host))
    return known and (url.port is None or 0 < url.port < 65536)


def _characters(choice: _Choice) -> int:
    """How much text a choice of a chunk carries; 0 where it carries none."""
    delta = choice.delta
    texts = (choice.text, delta.content, delta.reasoning_content or delta.reasoning)
    return sum(len(text or "") for text in texts) + sum(len(bytes(call)) for call in delta.tool_calls or ())


def split_events(chunks: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Server-sent events out of timed chunks: (time of the chunk that completed it, data). Comments are left out."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, chunk in chunks:
        rest = (rest + chunk).replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        for block in whole:
            data = b"\n".join(line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:"))
            if data:
                events.append((at, data))
    return events


def read_stream(record: Record, chunks: list[tuple[float, bytes]], request_bytes: int) -> None:
    """Fill times of content, counts and errors of `record` from the chunks of its stream (seconds)."""
    done, reported = False, None
    events = split_events(chunks)
    if not events:
        record.error = f"an answer without events: {b''.join(chunk for _, chunk in chunks)[:80]!r}"
        return
    for at, data in events:
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, RecursionError) as error:
            record.error = f"unreadable event {data[:80]!r}: {error}"
            return
        if event.error is not None:
            record.error = f"{event.error.code or event.error.type or 'error'}: {event.error.message}"[:300]
        for choice in event.choices:
            if size := _characters(choice):
                record.content_times.append(at)
                record.content_sizes.append(size)
            record.finish_reason = choice.finish_reason or record.finish_reason
        if event.usage is not None:
            reported = event.usage
    if record.error is None and not done and record.finish_reason is None:
        record.error = "the stream ended without a finish reason"
    record.output_tokens, record.chunks_because = usage.completion_tokens(
        reported, chunks=len(record.content_times), asked=record.wanted_tokens
    )
    record.prompt_tokens = usage.prompt_tokens(reported, request_bytes)
    record.cached_tokens = usage.cached_tokens(reported, record.prompt_tokens)


class Client:
    """Connections to one server. Use as an async context manager.

    `base_url` may end in `/v1` or not. Requests time out after `timeout_s` in all, however slowly bytes drip.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        if not _is_url(root):
            raise ValueError(f"{base_url!r} is no URL: write http://HOST:PORT")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key holds characters that no HTTP header can carry")
        # compressed text would come in other pieces than the server made
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = root
        self.timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=root,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4096),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[Card]:
        """What `GET /v1/models` lists, at least one. Raises ConnectionError naming the address and what was wrong."""
        url = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.get("/v1/models")
        except httpx.ConnectError as error:
            raise ConnectionError(
                f"{url} does not list models: {error}. Is a server running there (lowlat serve)?"
            ) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise ConnectionError(f"{url} does not list models: no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ConnectionError(f"{url} does not list models: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            cure = "; pass --api-key" if response.status_code in (401, 403) else ""
            reason = _refusal(response.status_code, response.content)
            raise ConnectionError(f"{url} does not list models: {reason}{cure}")
        try:
            listed = _decode_models(response.content).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionError(
                f"{url} does not list models: expected JSON as {MODELS_FORM}, got {response.content[:60]!r} ({error})"
            ) from error
        if not listed:
            raise ConnectionError(f"{url} lists no model: expected {MODELS_FORM}")
        return listed

    async def info(self) -> dict[str, Any]:
        """What `GET /v1/info` of a lowlat server says; empty where a server has no such thing."""
        try:
            response = await self._http.get("/v1/info")
            response.raise_for_status()
            return dict(response.json())
        except (httpx.HTTPError, TypeError, ValueError):
            return {}

    async def stream(self, path: str, body: dict[str, Any], *, name: str = "") -> Record:
        """Send one streaming request to `/v1/{path}` and time what comes back. Never raises for what a server does."""
        content = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        asked = body.get("max_tokens")
        request = self._http.build_request("POST", f"/v1/{path}", content=content)
        chunks: list[tuple[float, bytes]] = []
        clock = time.perf_counter
        record = Record(name=name, wanted_tokens=asked, sent=clock())
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    record.status = response.status_code
                    if response.status_code == 200:
                        async for chunk in response.aiter_raw():
                            chunks.append((clock(), chunk))
                    else:
                        record.error = _refusal(response.status_code, await response.aread())
                finally:
                    await response.aclose()
        except TimeoutError:
            record.error = f"no end within {self.timeout_s:g} s"
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended = clock()
        if record.error is None:
            read_stream(record, chunks, len(content))
        return record


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _decode_event(body).error
    except (msgspec.DecodeError, RecursionError):
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"[:400]
