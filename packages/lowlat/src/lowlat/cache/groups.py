"""Cache groups: what a model keeps for each token, declared by the model and sized by the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

Lifetime = Literal["all", "window", "state"]


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state that a model keeps while it works on a request.

    `all`: an entry for every token, kept as long as the request (ordinary keys and values); `window`: entries of the
    last `window` tokens, in pages of a pool of its own; `state`: one fixed-size record a request.
    """

    name: str
    bytes_per_entry: int
    """Bytes of one entry on one rank, all layers together."""
    tokens_per_entry: int = 1
    lifetime: Lifetime = "all"
    window: int = 0
    replicated: bool = False
    """Under tensor parallelism: every rank holds all of it (true) or its own shard (false)."""


def bytes_per_token(groups: list[CacheGroup]) -> int:
    """Bytes that a token needs in pages as long as its request lives, rounded up."""
    return sum(-(-group.bytes_per_entry // group.tokens_per_entry) for group in groups if group.lifetime == "all")


def whole(groups: list[CacheGroup]) -> list[CacheGroup]:
    """The groups where layers with a window have no pages of their own: they keep all tokens."""
    return [msgspec.structs.replace(group, lifetime="all") if group.lifetime == "window" else group for group in groups]


def window_of(groups: list[CacheGroup]) -> tuple[int, int]:
    """Tokens that rows see in layers with a window, and bytes of one token there; (0, 0): the model has none."""
    windows = [group for group in groups if group.lifetime == "window"]
    return max((group.window for group in windows), default=0), sum(group.bytes_per_entry for group in windows)


def state_bytes(groups: list[CacheGroup]) -> int:
    """Bytes of one request's fixed-size record; 0: the model keeps none."""
    return sum(group.bytes_per_entry for group in groups if group.lifetime == "state")


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that hold `tokens` entries."""
    return -(-tokens // page_size)
