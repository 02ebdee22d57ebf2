"""The words that a field of a body may hold, for the error that refuses another one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

_STEP = re.compile(r"\[\d*\]|[^.\[\]]+")


def allowed_words(form: type[msgspec.Struct], path: str) -> list[str]:
    """Values of the enumeration at `path`, such as `messages[0].role`, in alphabetical order.

    Where several forms are possible on the way, those of all of them. Empty where the path leads to no enumeration.
    """
    places = [inspect.type_info(form)]
    for step in _STEP.findall(path):
        places = [inner for place in places for inner in _below(place, step)]
    words = [value for place in places for value in _words(place)]
    return list(dict.fromkeys(words))


def _alternatives(place: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(place, inspect.Metadata):
        yield from _alternatives(place.type)
    elif isinstance(place, inspect.UnionType):
        for one in place.types:
            yield from _alternatives(one)
    else:
        yield place


def _below(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for one in _alternatives(place):
        if step.startswith("["):
            if isinstance(one, inspect.ListType):
                yield one.item_type
        elif isinstance(one, inspect.StructType):
            yield from (field.type for field in one.fields if field.encode_name == step)


def _words(place: inspect.Type) -> Iterator[str]:
    for one in _alternatives(place):
        if isinstance(one, inspect.LiteralType):
            yield from (value for value in one.values if isinstance(value, str))
