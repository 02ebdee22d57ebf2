"""A streaming client that only takes times while a stream runs, and reads what the chunks said afterwards.

A chunk's time is taken when its bytes leave the socket; JSON is parsed once the stream has ended. Parsing between two
chunks would delay the second one's time stamp on a busy core.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec

from lowlat.bench.load.records import Record


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _has_content(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


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


def read_stream(record: Record, chunks: list[tuple[float, bytes]]) -> None:
    """Fill times of content, counts and errors of `record` from the chunks of its stream (seconds)."""
    done = False
    for at, data in split_events(chunks):
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            record.error = f"unreadable event {data[:80]!r}: {error}"
            return
        if event.error is not None:
            record.error = f"{event.error.code or event.error.type or 'error'}: {event.error.message}"[:300]
        for choice in event.choices:
            if _has_content(choice):
                record.content_times.append(at)
            record.finish_reason = choice.finish_reason or record.finish_reason
        if event.usage is not None:
            record.prompt_tokens = event.usage.prompt_tokens
            record.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    if record.error is None and not done and record.finish_reason is None:
        record.error = "the stream ended without a finish reason"
    if record.output_tokens is None:
        record.output_tokens = len(record.content_times)
        record.counted_chunks = True


class Client:
    """Connections to one server. Use as an async context manager.

    `base_url` may end in `/v1` or not. Requests time out after `timeout_s` in all, however slowly bytes drip.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        if not root.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is no URL: write http://HOST:PORT")
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
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

    async def models(self) -> list[dict[str, Any]]:
        """What `GET /v1/models` lists. Raises ConnectionError naming the server where it does not answer."""
        try:
            response = await self._http.get("/v1/models")
            response.raise_for_status()
            listed = response.json()["data"]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise ConnectionError(f"{self._http.base_url} does not list models: {error!r}") from error
        return list(listed)

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
        request = self._http.build_request("POST", f"/v1/{path}", content=content)
        chunks: list[tuple[float, bytes]] = []
        clock = time.perf_counter
        record = Record(name=name, sent=clock())
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
            read_stream(record, chunks)
        return record


def _refusal(status: int, body: bytes) -> str:
    try:
        error = _decode_event(body).error
    except msgspec.DecodeError:
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"[:400]
