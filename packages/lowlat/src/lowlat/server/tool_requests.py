"""Tools as clients send them: their forms, their limits, and what `tool_choice` asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lowlat.server.errors import bad_field
from lowlat.text.tool_calls.grammars import Function

MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 * 2**10
MAX_TOOLS_BYTES = 2**20
MAX_SCHEMA_DEPTH = 32

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; absent: no arguments."""
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    arguments: str
    """The text of a JSON object."""


class PastCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's message that a client sends back."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class OfferedTools(msgspec.Struct, frozen=True, kw_only=True):
    """What one request offers, checked."""

    functions: tuple[FunctionTool, ...] = ()
    """What the template shows; empty when nothing may be called."""
    callable: tuple[Function, ...] = ()
    """What may be called: all of them, or the one that `tool_choice` names."""
    must_call: bool = False
    only_one: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(function.name for function in self.callable)


def offered_tools(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None, *, where: str = "tools"
) -> OfferedTools:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say together.

    Raises:
        ApiError: 400; a limit is broken, a name is there twice, or `tool_choice` fits no tool.
    """
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools:
        if named is not None or choice == "required":
            raise bad_field("tool_choice", "asks for a call, but there are no tools")
        return OfferedTools()
    functions = [tool.function for tool in tools]
    schemas = [
        Function(function.name, _schema(function, f"{where}[{number}]")) for number, function in enumerate(functions)
    ]
    _check_size(functions, where)
    if choice == "none":
        return OfferedTools()
    callable = tuple(schema for schema in schemas if named in (None, schema.name))
    if not callable:
        raise bad_field("tool_choice", f"there is no tool named {named!r}")
    return OfferedTools(
        functions=tuple(functions),
        callable=callable,
        must_call=named is not None or choice == "required",
        only_one=parallel is False,
    )


def _schema(function: FunctionTool, where: str) -> dict[str, Any]:
    schema = function.parameters or {}
    kind = schema.get("type", "object")
    if kind != "object":
        raise bad_field(f"{where}.function.parameters.type", f"must be 'object', got {str(kind)[:64]!r}")
    if not isinstance(schema.get("properties", {}), dict):
        raise bad_field(f"{where}.function.parameters.properties", "must be an object")
    if deeper_than(schema, MAX_SCHEMA_DEPTH):
        raise bad_field(f"{where}.function.parameters", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return {"type": "object", "properties": {}, **schema}


def _check_size(functions: list[FunctionTool], where: str) -> None:
    total = 0
    seen: set[str] = set()
    for number, function in enumerate(functions):
        if function.name in seen:
            raise bad_field(f"{where}[{number}].function.name", f"{function.name!r} is there twice")
        seen.add(function.name)
        size = len(msgspec.json.encode(function))
        total += size
        if size > MAX_TOOL_BYTES:
            raise bad_field(f"{where}[{number}].function", f"is {size} bytes of JSON; at most {MAX_TOOL_BYTES}")
    if total > MAX_TOOLS_BYTES:
        raise bad_field(where, f"are {total} bytes of JSON together; at most {MAX_TOOLS_BYTES}")


def deeper_than(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than `levels` levels of objects and lists."""
    if isinstance(value, dict):
        return levels == 0 or any(deeper_than(item, levels - 1) for item in value.values())
    if isinstance(value, list):
        return levels == 0 or any(deeper_than(item, levels - 1) for item in value)
    return False
