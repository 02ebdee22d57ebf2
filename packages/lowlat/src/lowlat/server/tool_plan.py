"""What tools and reasoning add to a plan: how the answer is read, and the grammar of an answer that must call."""

from __future__ import annotations

import msgspec

from lowlat.engine.request import Grammar
from lowlat.server.grammar_fields import one_grammar
from lowlat.server.plan import Plan
from lowlat.server.text_model import TextModel
from lowlat.server.tool_requests import OfferedTools
from lowlat.text.tool_calls.formats import Reading
from lowlat.text.tool_calls.grammars import calls_grammar


def read_tools(plan: Plan, tools: OfferedTools, text: TextModel) -> Plan:
    """The plan of a chat (one prompt) with its reading, and its grammar where a call is required."""
    reading = reading_of(plan.prompts[0], tools, text)
    if reading is None:
        return plan
    plan = msgspec.structs.replace(plan, reading=reading)
    if not tools.must_call:
        return plan
    other = None if plan.sampling.grammar is None else (plan.grammar_field, plan.sampling.grammar)
    field, grammar = one_grammar(("tool_choice", grammar_of(tools, reading)), other)
    return msgspec.structs.replace(
        plan, sampling=msgspec.structs.replace(plan.sampling, grammar=grammar), grammar_field=field
    )


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
