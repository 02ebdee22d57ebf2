"""When a request waits for a prefix that another request is computing, instead of computing it too (decision 0111)."""

from __future__ import annotations

from collections.abc import Iterable

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.active import ActiveRequest

WORTH_WAITING = 64
"""Tokens of a prefix from which on it is waited for."""


def comes_soon(
    waiting: ActiveRequest, cached_tokens: int, computing: Iterable[ActiveRequest], cache: PrefixCache
) -> bool:
    """Whether one of `computing` will soon share more of `waiting`'s prefix than the `cached_tokens` found now.

    `computing`: requests of which steps are launched or to come, ended ones included.
    """
    limit = waiting.shared_limit
    if not cache.enabled or cache.snapshots is not None or limit - cached_tokens < WORTH_WAITING:
        return False
    for active in computing:
        # Of a request that has ended, what is launched still comes.
        end = min(active.launched if active.ended else active.prefill_end, active.shareable)
        if active.filled >= end or active.order[0] > waiting.order[0]:
            continue  # shared already, or of a lower priority, so that it may take long
        if active.request.cache_salt != waiting.request.cache_salt:
            continue
        common = common_tokens(active.tokens, waiting.tokens, min(end, limit))
        common -= common % cache.page_size
        saved, later = common - cached_tokens, end - common
        # With windows, a prefix can be gone on from at the end of what was shared only.
        if saved >= WORTH_WAITING and later <= (saved if cache.windows is None else cache.page_size):
            return True
    return False


def common_tokens(one: list[int], other: list[int], limit: int) -> int:
    """Tokens that two lists have in common from the start, at most `limit`."""
    limit = min(limit, len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit
    while low + 1 < high:  # the first `low` are the same, of the first `high` some are not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
