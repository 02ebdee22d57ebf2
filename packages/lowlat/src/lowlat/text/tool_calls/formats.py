"""Which formats there are, which of them a model writes, and the reader for an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from lowlat.text.tool_calls import dsml
from lowlat.text.tool_calls.channels import ChannelFormat, ChannelReader
from lowlat.text.tool_calls.deepseek_v3 import DeepseekV3
from lowlat.text.tool_calls.harmony import Harmony
from lowlat.text.tool_calls.hermes import Hermes
from lowlat.text.tool_calls.llama3 import Llama3
from lowlat.text.tool_calls.muse import Muse
from lowlat.text.tool_calls.parser import CallFormat, ToolCallParser
from lowlat.text.tool_calls.parts import Reader
from lowlat.text.tool_calls.think import OPEN, ThinkReader

CHANNEL_FORMATS: dict[str, Callable[[], ChannelFormat]] = {"harmony": Harmony, "muse": Muse}
"""They frame reasoning, content and calls alike, so one reader has all three."""
CALL_FORMATS: dict[str, Callable[[], CallFormat]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "deepseek_v3": DeepseekV3,
    "deepseek_v31": DeepseekV3,
    "deepseek_v32": dsml.v32,
    "deepseek_v4": dsml.v4,
    "deepseek_v41": dsml.v41,
}
TOOL_PARSERS = (*CALL_FORMATS, *CHANNEL_FORMATS)
REASONING_PARSERS = ("think", *CHANNEL_FORMATS)

_TOOL_SIGNS = (
    (("atem:function_calls",), "muse"),
    (("<|channel|>",), "harmony"),
    (("｜DSML｜ calls",), "deepseek_v41"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("｜DSML｜function_calls",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (("<|start_header_id|>",), "llama3"),
)
"""Texts of a chat template, and the format that they tell of; the first line that fits counts."""
_ARCHITECTURES = {
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "MuseSparkForConditionalGeneration": "muse",
    "GptOssForCausalLM": "harmony",
}
"""For models whose checkpoints have no template, or one that does not show its format."""


class AnswerFormats(msgspec.Struct, frozen=True):
    """How a served model writes tool calls and reasoning."""

    tools: str = "hermes"
    """One of `TOOL_PARSERS`."""
    reasoning: str | None = None
    """One of `REASONING_PARSERS`; None: reasoning is not told from content."""

    def reader(self, names: Collection[str], *, only_one: bool = False, opened: bool = False) -> Reader | None:
        """A reader for one answer; None when its text is content as it is.

        Args:
            names: functions that may be called; none: calls are not looked for.
            only_one: the answer ends with its first call.
            opened: the prompt ends within reasoning.
        """
        if self.reasoning in CHANNEL_FORMATS or (names and self.tools in CHANNEL_FORMATS):
            form = CHANNEL_FORMATS[self.reasoning if self.reasoning in CHANNEL_FORMATS else self.tools]()
            return ChannelReader(form, names, only_one=only_one, split=self.reasoning is not None)
        inner = ToolCallParser(CALL_FORMATS[self.tools](), names, only_one=only_one) if names else None
        return ThinkReader(inner, opened=opened) if self.reasoning == "think" else inner


class Reading(msgspec.Struct, frozen=True):
    """How the answers of one request are to be read."""

    formats: AnswerFormats
    names: tuple[str, ...] = ()
    only_one: bool = False
    opened: bool = False

    def reader(self) -> Reader | None:
        return self.formats.reader(self.names, only_one=self.only_one, opened=self.opened)


def choose_formats(
    template: str | None, architecture: str | None = None, *, tools: str = "auto", reasoning: str = "auto"
) -> AnswerFormats:
    """The formats of a model.

    Args:
        template: source of its chat template.
        architecture: as config.json names it.
        tools: one of `TOOL_PARSERS`, or `auto`: by template, else by architecture, else `hermes`.
        reasoning: one of `REASONING_PARSERS`, `off`, or `auto`: by template, else by architecture, else off.

    Raises:
        ValueError: an unknown name, or two formats that cannot be read together.
    """
    for name, known, flag in ((tools, TOOL_PARSERS, "tool"), (reasoning, (*REASONING_PARSERS, "off"), "reasoning")):
        if name != "auto" and name not in known:
            raise ValueError(f"there is no {flag} parser {name!r}; choose one of auto, {', '.join(known)}")
    source = template or ""
    by_model = _ARCHITECTURES.get(architecture or "")
    # A template without tools says nothing of calls, though it may hold one of the signs.
    found = next((form for signs, form in _TOOL_SIGNS if all(sign in source for sign in ("tool", *signs))), None)
    form = tools if tools != "auto" else found or by_model or "hermes"
    thinks: str | None = None if reasoning == "off" else reasoning
    if reasoning == "auto":
        thinks = _reasoning_of(source, by_model, form)
    framed = {name for name in (form, thinks) if name in CHANNEL_FORMATS}
    if framed and thinks is not None and {form, thinks} != framed:
        raise ValueError(f"tool parser {form!r} and reasoning parser {thinks!r} cannot read the same answer")
    if len(framed) > 1:
        raise ValueError(f"tool parser {form!r} and reasoning parser {thinks!r} frame messages differently")
    return AnswerFormats(form, thinks)


def _reasoning_of(template: str, by_model: str | None, tools: str) -> str | None:
    if tools in CHANNEL_FORMATS:
        return tools
    if OPEN in template or (by_model or "").startswith("deepseek"):
        return "think"
    return None
