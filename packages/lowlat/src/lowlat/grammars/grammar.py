"""What an answer must look like, as callers say it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]

CURE = "install it with: pip install --no-deps xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2 (and pip install pydantic)"


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why, and what helps."""


class GrammarsBusyError(GrammarError):
    """Too many grammars wait to be compiled."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must look like. Raises nothing by itself: that it compiles is found out by the engine.

    The kinds, and what `text` holds:

    - `json_object`: any JSON object; `text` is empty.
    - `json_schema`: a JSON schema, as JSON. Properties that it does not name are not allowed unless it says so.
    - `regex`: a regular expression that the whole answer matches.
    - `ebnf`: a grammar in GBNF, llama.cpp's form of EBNF, whose first rule is `root`.
    - `choice`: a JSON list of texts, of which the answer is one.
    - `structural_tag`: an XGrammar structural tag, as JSON: free text with parts that follow grammars (tool calls).
    """

    kind: GrammarKind
    text: str = ""

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """Answers that a JSON schema accepts."""
        return cls("json_schema", msgspec.json.encode(schema).decode())

    @classmethod
    def choice(cls, options: Sequence[str]) -> Grammar:
        """Answers that are one of `options`."""
        return cls("choice", msgspec.json.encode(list(options)).decode())


def check_installed() -> None:
    """Raises `GrammarError` where XGrammar is not installed."""
    if importlib.util.find_spec("xgrammar") is None:
        raise GrammarError(f"grammars need XGrammar, which is not installed here; {CURE}")
