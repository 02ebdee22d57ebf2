"""What a JSON schema may say here, and how the compiler is told.

What the compiler would leave out in silence is refused, so answers always fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowlat.grammars.grammar import GrammarError
from lowlat.grammars.patterns import length_pattern, safe_pattern

_UNSUPPORTED = {
    "uniqueItems", "contains", "minContains", "maxContains", "not", "dependentRequired", "dependentSchemas",
    "dependencies", "if", "then", "else", "$dynamicRef", "$recursiveRef", "contentSchema", "additionalItems",
}  # fmt: skip
"""Keywords that the compiler ignores."""

_NEUTRAL: tuple[tuple[str, Any], ...] = (("uniqueItems", False), ("minContains", 0))

_ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly",
}  # fmt: skip

_FORMATS = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer", "uuid",
}  # fmt: skip

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_STRINGS = ("minLength", "maxLength", "pattern", "format")
_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems")
_NEEDS_TYPE = {
    **dict.fromkeys(_NUMBERS, ("number", "integer")),
    **dict.fromkeys(_STRINGS, ("string",)),
    **dict.fromkeys(_ARRAYS, ("array",)),
}

_SCHEMAS = ("additionalProperties", "items", "unevaluatedItems", "unevaluatedProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
}


def prepare_schema(schema: Any) -> None:
    """Rewrite a schema, in place, to an equal one that the compiler gets right.

    Raises `GrammarError` naming the place of the first keyword that cannot be enforced.
    """
    open_ends: list[tuple[str, Any]] = [("$", schema)]
    while open_ends:
        where, part = open_ends.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise GrammarError(f"{where}: a schema is an object, true or false")
        _check_keywords(where, part)
        _rewrite_string(where, part)
        open_ends.extend(_parts(where, part))


def _parts(where: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SCHEMAS:
        if key in part:
            yield f"{where}.{key}", part[key]
    for key in _LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{where}.{key}[{n}]", item) for n, item in enumerate(part[key]))
    for key in _MAPS:
        if isinstance(part.get(key), dict):
            yield from ((f"{where}.{key}.{name}", item) for name, item in part[key].items())


def _check_keywords(where: str, part: dict[str, Any]) -> None:
    for key in sorted(_UNSUPPORTED & part.keys()):
        if not any(key == name and part[key] is value for name, value in _NEUTRAL):
            raise GrammarError(f"{where}.{key}: this keyword cannot be enforced; leave it out of the schema")
    if "$ref" in part and (beside := sorted(part.keys() - _ANNOTATIONS - {"$ref"})):
        raise GrammarError(f"{where}.{beside[0]}: keywords beside $ref cannot be enforced; move them into its target")
    _check_type(where, part)
    format = part.get("format")
    if format is not None and not (isinstance(format, str) and format in _FORMATS):
        raise GrammarError(f"{where}.format: {format!r} is not known; known: {', '.join(sorted(_FORMATS))}")
    named, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"{where}.required: a list of names of properties")
    for name in required:
        if isinstance(named, dict) and name not in named:
            raise GrammarError(f"{where}.required: {name!r} is not among the properties; describe it there")
    combined = [key for key in ("anyOf", "oneOf", "allOf", "enum", "const") if key in part]
    allowed = _ANNOTATIONS | {"discriminator"} | ({"type"} if combined in (["enum"], ["const"]) else set())
    beside = [*combined, *sorted((part.keys() - set(combined) - allowed) & _ASSERTIONS)]
    if combined and len(beside) > 1:
        raise GrammarError(
            f"{where}: {beside[0]} and {beside[1]} cannot be enforced together; move one into the other's branches"
        )


_OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "propertyNames", "unevaluatedProperties",
)  # fmt: skip
_ASSERTIONS = {"type", *_NEEDS_TYPE, *_OBJECTS}


def _rewrite_string(where: str, part: dict[str, Any]) -> None:
    """Lengths become patterns."""
    lengths = [key for key in ("minLength", "maxLength") if key in part]
    given = [*lengths[:1], *(key for key in ("pattern", "format") if key in part)]
    if len(given) > 1:
        raise GrammarError(f"{where}.{given[1]}: cannot be enforced together with {given[0]}")
    if lengths:
        least, most = part.pop("minLength", 0), part.pop("maxLength", None)
        for limit in (least, 0 if most is None else most):
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
                raise GrammarError(f"{where}.{lengths[0]}: lengths are whole numbers, 0 or more")
        if most is not None and most < least:
            raise GrammarError(f"{where}.maxLength: {most} is less than minLength {least}")
        part["pattern"] = length_pattern(least, most)
    elif "pattern" in part:
        part["pattern"] = _safe(f"{where}.pattern", part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        place = f"{where}.patternProperties"
        part["patternProperties"] = {_safe(place, name): item for name, item in part["patternProperties"].items()}


def _safe(where: str, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise GrammarError(f"{where}: a pattern is a text")
    try:
        return safe_pattern(pattern)
    except GrammarError as error:
        raise GrammarError(f"{where}: {error}") from None


def _check_type(where: str, part: dict[str, Any]) -> None:
    given = part.get("type")
    types = [given] if isinstance(given, str) else given
    if types is None:
        for key in part.keys() & _NEEDS_TYPE.keys():
            raise GrammarError(f"{where}.{key}: needs a type beside it: {' or '.join(_NEEDS_TYPE[key])}")
        return
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise GrammarError(f"{where}.type: a name or a list of names")
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    for value in values:
        if not any(_is_a(value, name) for name in types):
            raise GrammarError(f"{where}: the value {value!r} is not of the type {given!r}")


def _is_a(value: Any, name: str) -> bool:
    if name == "integer":
        return value.is_integer() if isinstance(value, float) else type(value) is int
    if isinstance(value, bool) and name == "number":
        return False
    return isinstance(value, _TYPES.get(name, ()))
