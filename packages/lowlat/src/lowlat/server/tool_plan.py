"""What tools and reasoning add to a plan: how the answer is read, and the grammar of an answer that must call."""

from __future__ import annotations

import copy

import msgspec

from lowlat.grammars.grammar import Grammar, GrammarError
from lowlat.grammars.schema import prepare_schema
from lowlat.server.errors import bad_field
from lowlat.server.grammar_fields import one_grammar
from lowlat.server.plan import Plan
from lowlat.server.text_model import TextModel
from lowlat.server.tool_requests import OfferedTools
from lowlat.text.tool_calls.formats import Reading
from lowlat.text.tool_calls.grammars import after_reasoning, calls_grammar, format_of


def read_tools(plan: Plan, tools: OfferedTools, text: TextModel) -> Plan:
    """The plan of a chat (one prompt) with its reading, and its grammar where a call is required.

    A grammar that the request brings holds for what comes after reasoning.

    Raises:
        ApiError: 400; a call is required and a schema says what cannot be enforced, or there is another grammar.
    """
    reading = reading_of(plan.prompts[0], tools, text)
    if reading is None:
        return plan
    plan = msgspec.structs.replace(plan, reading=reading)
    grammar, field = plan.sampling.grammar, plan.grammar_field
    if tools.must_call:
        check_schemas(tools)
        other = None if grammar is None else (field, grammar)
        field, grammar = one_grammar(("tool_choice", grammar_of(tools, reading)), other)
    elif grammar is not None:
        grammar = behind_reasoning(grammar, reading, field)
    sampling = msgspec.structs.replace(plan.sampling, grammar=grammar)
    return msgspec.structs.replace(plan, sampling=sampling, grammar_field=field)


def check_schemas(tools: OfferedTools) -> None:
    """Raises ApiError: 400 naming the tool whose schema says what a grammar cannot enforce."""
    names = [function.name for function in tools.functions]
    for function in tools.callable:
        try:
            prepare_schema(copy.deepcopy(function.schema))
        except GrammarError as error:
            where = f"tools[{names.index(function.name)}].function.parameters"
            raise bad_field(where, f"{error}; a required call follows its schema", code="invalid_grammar") from None


def behind_reasoning(grammar: Grammar, reading: Reading, field: str) -> Grammar:
    """A grammar of the answer as one of reasoning and answer."""
    reasoning = reading.formats.reasoning
    if reasoning is None:
        return grammar
    if reasoning != "think":
        raise bad_field(field, f"answers of the form {reasoning!r} cannot follow a grammar", code="unsupported")
    try:
        format = format_of(grammar.kind, grammar.text)
        if grammar.kind == "json_schema":
            prepare_schema(copy.deepcopy(format["json_schema"]))
        tag = {"type": "structural_tag", "format": after_reasoning(format, reasoning, reading.opened)}
        return Grammar("structural_tag", msgspec.json.encode(tag).decode())
    except (ValueError, KeyError, TypeError) as error:
        raise bad_field(field, f"cannot be followed: {error}", code="invalid_grammar") from None
    except RecursionError:
        raise bad_field(field, "is nested too deeply", code="invalid_grammar") from None


def reading_of(prompt_ids: list[int], tools: OfferedTools, text: TextModel) -> Reading | None:
    """How the answer to this prompt is read; None: its text is content as it is."""
    formats = text.formats
    if not tools.names and formats.reasoning is None:
        return None
    opened = formats.reasoning == "think" and text.ends_in_reasoning(prompt_ids)
    return Reading(formats, tools.names, tools.only_one, opened)


def grammar_of(tools: OfferedTools, reading: Reading) -> Grammar:
    """The grammar of an answer that must call one of the tools."""
    formats = reading.formats
    tag = calls_grammar(
        formats.tools,
        tools.callable,
        only_one=tools.only_one,
        reasoning=formats.reasoning,
        opened=reading.opened,
    )
    return Grammar("structural_tag", msgspec.json.encode(tag).decode())
