"""What an answer is made of once its markup is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the model thought before it answered."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """One whole call of an offered function; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


Part = Reasoning | Content | ToolCall


class Reader(Protocol):
    """Reads one answer. The joined parts of all calls do not depend on how the text was cut into pieces."""

    @property
    def complete(self) -> bool:
        """The answer has all that was asked for (one call, where only one is allowed); what follows is dropped."""

    @property
    def markers(self) -> Sequence[str]:
        """Control tokens that must reach the reader although clients never see them."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What is still held, at the end of the answer."""


class MalformedError(Exception):
    """The text is not of the form that a call has; it becomes content."""


def arguments_text(arguments: Any) -> str:
    """A JSON object as the text of a call's arguments.

    Raises:
        MalformedError: not an object, or it holds what JSON cannot (infinity).
    """
    if not isinstance(arguments, dict):
        raise MalformedError
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise MalformedError from error
    return text


def parse_json(text: str) -> Any:
    """A JSON value; raw line breaks in strings are taken as models mean them.

    Raises:
        MalformedError: not JSON.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def joined(parts: Sequence[Part]) -> list[Part]:
    """The same parts with neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found
