"""Fields of a request that say what its answer must look like, and the one grammar that comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from lowlat.grammars.grammar import Grammar
from lowlat.server.errors import bad_field

Json = Annotated[msgspec.Raw, Meta(description="Any JSON value, or a text that holds one.")] | msgspec.UnsetType
Choices = Annotated[list[str], Meta(min_length=1, max_length=65536)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Json = msgspec.UNSET
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Answers follow the schema whatever this says.")] = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`response_format` of the OpenAI API; and, as other servers have it, a structural tag with its `format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Json = msgspec.UNSET


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of these; the names are vLLM's."""

    json: Json = msgspec.UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Json = msgspec.UNSET


class GrammarFields(Protocol):
    """What a request may say of its answer's form; at most one thing. `guided_*` are older names."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Json
    guided_regex: str | None
    guided_choice: Choices | None
    guided_grammar: str | None


def grammar_of(body: GrammarFields) -> tuple[str, Grammar | None]:
    """The field that asks for a grammar, and the grammar; ("", None) where none does.

    Raises:
        ApiError: 400; two fields ask for one, or one lacks its part.
    """
    return one_grammar(*_grammars(body))


def one_grammar(*found: tuple[str, Grammar] | None) -> tuple[str, Grammar | None]:
    """The one grammar among those that fields ask for, with its field; ("", None) where there is none.

    Raises:
        ApiError: 400; there are two.
    """
    given = [one for one in found if one is not None]
    if len(given) > 1:
        raise bad_field(given[1][0], f"cannot be combined with {given[0][0]}; send one of them")
    return given[0] if given else ("", None)


def _grammars(body: GrammarFields) -> Iterator[tuple[str, Grammar]]:
    if body.response_format is not None and body.response_format.type != "text":
        yield "response_format", _of_format(body.response_format)
    if (outputs := body.structured_outputs) is not None:
        named = list(_of_outputs(outputs))
        if not named:
            names = ", ".join(StructuredOutputs.__struct_fields__)
            raise bad_field("structured_outputs", f"says nothing; give one of {names}")
        yield from named
    yield from _texts("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)
    if (schema := _text(body.guided_json)) is not None:
        yield "guided_json", Grammar("json_schema", schema)


def _of_format(format: ResponseFormat) -> Grammar:
    if format.type == "json_object":
        return Grammar("json_object")
    if format.type == "structural_tag":
        inner = _text(format.format)
        if inner is None:
            raise bad_field("response_format.format", "is required with type structural_tag")
        return Grammar("structural_tag", '{"type":"structural_tag","format":' + inner + "}")
    if format.json_schema is None:
        raise bad_field("response_format.json_schema", "is required with type json_schema")
    return Grammar("json_schema", _text(format.json_schema.schema) or "{}")


def _of_outputs(outputs: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    prefix = "structured_outputs."
    if (schema := _text(outputs.json)) is not None:
        yield prefix + "json", Grammar("json_schema", schema)
    if outputs.json_object:
        yield prefix + "json_object", Grammar("json_object")
    yield from _texts(prefix, outputs.regex, outputs.choice, outputs.grammar)
    if (tag := _text(outputs.structural_tag)) is not None:
        yield prefix + "structural_tag", Grammar("structural_tag", tag)


def _texts(
    prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Grammar]]:
    if regex is not None:
        yield prefix + "regex", Grammar("regex", regex)
    if choice is not None:
        yield prefix + "choice", Grammar.choice(choice)
    if grammar is not None:
        yield prefix + "grammar", Grammar("ebnf", grammar)


def _text(value: Json) -> str | None:
    """A JSON value as its text; a text stands for the JSON that it holds; None for nothing and null."""
    text = "null" if isinstance(value, msgspec.UnsetType) else bytes(value).strip().decode()
    if text == "null":
        return None
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text
