"""A chat with a server, over its streaming API; the standard library is enough."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lowlat.engine.config import SIMULATED
from lowlat.engine.request import SamplingParams


class RemoteError(ValueError):
    """The server cannot be reached or refused; the text says why."""


def remote_answer(
    url: str, sampling: SamplingParams, api_key: str | None
) -> Callable[[list[dict[str, str]]], Iterator[str]]:
    """A function from messages to the pieces of the answer.

    Raises (when called):
        RemoteError: no connection, or an error answer.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"

    def answer(messages: list[dict[str, str]]) -> Iterator[str]:
        connection = connect(parts.hostname or "localhost", parts.port, timeout=600)
        try:
            connection.request("POST", path, _body(messages, sampling), headers)
            yield from _read(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"no answer from {url}: {error}. Is a server running there? (lowlat serve)") from error
        finally:
            connection.close()  # a stream that is left early is thereby cancelled

    return answer


def _body(messages: list[dict[str, str]], sampling: SamplingParams) -> bytes:
    fields: dict[str, Any] = {
        "messages": messages,
        "stream": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    # Only what was asked for is sent, so that servers of other projects can be talked to as well.
    usual = SamplingParams()
    for name in ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        if getattr(sampling, name) != getattr(usual, name):
            fields[name] = getattr(sampling, name)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return msgspec.json.encode(fields)


def _read(response: http.client.HTTPResponse) -> Iterator[str]:
    if response.status != 200:
        hint = ". lowlat chat sends the key in LOWLAT_API_KEY" if response.status == 401 else ""
        raise RemoteError(_error(response.read(), f"HTTP status {response.status}") + hint)
    if response.getheader("x-lowlat-simulated-acceptance") is not None:
        print(f"[{SIMULATED}]", file=sys.stderr)
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if not data:
            continue
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            raise RemoteError(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _error(body: bytes, otherwise: str) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return otherwise
