"""What of a server's usage is believed: counts that contradict what came over the wire are not."""

from __future__ import annotations

from typing import Any

TEMPLATE_TOKENS = 65536
"""Tokens that a server may put around a prompt (a template, instructions of its own); text has at most one a byte."""


def _count(value: object) -> int | None:
    """A whole number that is not negative."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def completion_tokens(usage: Any, *, chunks: int, asked: int | None) -> tuple[int, str]:
    """Tokens of an answer that came in `chunks` pieces of text, `asked` for at most, and why they are not the server's.

    The reason is empty where its `completion_tokens` is believed. Otherwise every chunk counts as one token.
    """
    said = usage.get("completion_tokens") if isinstance(usage, dict) else usage
    if said is None:
        return chunks, "the server reports no usage"
    count = _count(said)
    if count is None:
        return chunks, f"the server's usage, {str(said)[:40]!r}, is no count of tokens"
    if count < chunks:
        return chunks, f"the server's usage says {count} tokens, but {chunks} chunks came"
    if asked is not None and count > asked:
        return chunks, f"the server's usage says {count} tokens, but {asked} were asked for"
    return count, ""


def prompt_tokens(usage: Any, request_bytes: int) -> int | None:
    """Tokens of a prompt sent in so many bytes; None where the server says none, or a number that cannot be."""
    count = _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    return count if count and count <= request_bytes + TEMPLATE_TOKENS else None


def cached_tokens(usage: Any, prompt: int | None) -> int | None:
    """Tokens of the prompt that were taken from a cache; None where the server does not say, or says too many."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    count = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return count if count is not None and prompt is not None and count <= prompt else None
