"""From a `Grammar` to XGrammar's compiled form. Runs in a grammar's process, which alone ends if this goes wrong."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

from lowlat.grammars.grammar import Grammar, GrammarError
from lowlat.grammars.schema import prepare_schema

MAX_WHITESPACE = 64
"""Most white space in a row between the parts of a JSON text: a model must not fill an answer with it."""

_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|\\.', re.DOTALL)
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
_WARNING = re.compile(r"Warning: (.*)")


def check_depth(text: str, limit: int) -> None:
    """Raises `GrammarError` where brackets are nested deeper than `limit`; those in quoted strings do not count."""
    depth = 0
    for character in re.sub(r"[^()\[\]{}]", "", _STRINGS.sub("", text)):
        depth += 1 if character in "([{" else -1
        if depth > limit:
            raise GrammarError(f"it is nested deeper than the limit of {limit} levels (--grammar-depth)")


def compile_grammar(xgrammar: ModuleType, compiler: Any, grammar: Grammar, max_depth: int) -> Any:
    """XGrammar's CompiledGrammar. Raises `GrammarError`."""
    check_depth(grammar.text, max_depth)
    try:
        return _compile(compiler, grammar)
    except (GrammarError, MemoryError):
        raise
    except Exception as error:  # the binding raises RuntimeError, and subclasses of others
        if "bad_alloc" in str(error):
            raise MemoryError from None
        raise GrammarError(clean(str(error))) from None


def _compile(compiler: Any, grammar: Grammar) -> Any:
    kind, text = grammar.kind, grammar.text
    if kind == "json_object":
        return compiler.compile_json_schema('{"type":"object"}', strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    if kind == "json_schema":
        schema = _parse(text)
        prepare_schema(schema)
        return compiler.compile_json_schema(_write(schema), max_whitespace_cnt=MAX_WHITESPACE)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "ebnf":
        return compiler.compile_grammar(text)
    if kind == "choice":
        return compiler.compile_grammar("root ::= " + " | ".join(map(quote, _options(text))))
    if kind == "structural_tag":
        tag = _parse(text)
        _prepare_tag(tag)
        return compiler.compile_structural_tag(_write(tag))
    raise GrammarError(f"grammars of kind {kind!r} are not known")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None


def _write(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise GrammarError("a number is too large") from None


def _prepare_tag(tag: Any) -> None:
    """Rewrite the schemas in a structural tag."""
    if isinstance(tag, list):
        for item in tag:
            _prepare_tag(item)
    elif isinstance(tag, dict):
        for key, value in tag.items():
            if key == "json_schema":
                prepare_schema(value)
            else:
                _prepare_tag(value)


def _options(text: str) -> list[str]:
    options = _parse(text)
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise GrammarError("choices are a list of texts, at least one")
    return list(dict.fromkeys(options))


def quote(text: str) -> str:
    """A text as a literal of a GBNF grammar."""
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if " " <= character != "\x7f" else f"\\x{ord(character):02x}"


def clean(message: str) -> str:
    """An error of the library without the place in its source."""
    return _PLACE.sub("", message.strip()) or "the compiler gave no reason"


def first_warning(output: str) -> str | None:
    """What the compiler said that it leaves out, from what it wrote to the standard error stream."""
    found = _WARNING.search(output)
    return found[1].strip() if found else None
