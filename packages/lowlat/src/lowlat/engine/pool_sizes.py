"""How many pages the pools get: from the model's cache groups, the settings, and the memory there is."""

from __future__ import annotations

import msgspec

from lowlat.cache.groups import CacheGroup, bytes_per_token, pages_for, window_of
from lowlat.cache.windows import WindowPages, most_pages
from lowlat.engine.config import EngineConfig


class PoolSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of all pools, and what is needed to hand out those of layers with a window."""

    page_size: int
    pages: int
    window_pages: int = 0
    window: int = 0
    """Tokens that rows see in layers whose window pages these are, their own included; 0: there are none."""
    span: int = 0
    """Most tokens between the earliest row that a step may have for a request and the end of what it may write."""
    window_pages_each: int = 0
    """Most window pages that a request needs at a time, but for one that scores long items."""

    def windows(self) -> WindowPages | None:
        """The books of the window pages; None without such layers."""
        if not self.window:
            return None
        return WindowPages(self.window_pages, self.page_size, self.window, self.span)

    def longest_item(self, max_context: int) -> int:
        """Most tokens of an item that may stand in one sequence with others: its window pages must fit the pool."""
        if not self.window or self.window_pages == self.pages:
            return max_context
        return min(max_context, (self.window_pages - 2) * self.page_size - self.window + 2)


def pool_sizes(
    config: EngineConfig,
    groups: list[CacheGroup],
    memory: int,
    *,
    max_context: int,
    width: int = 1,
    draft_token_bytes: int = 0,
) -> PoolSizes:
    """Sizes within `memory` bytes, or for `kv_tokens` where that is given.

    Window pages are what all requests need at a time, and with a prefix cache as much again for the ends of their
    prompts and of their answers; but never more than there are pages, since each belongs to one. `width`: most rows of
    a request in a decode step. `draft_token_bytes`: bytes of a token in the pools of a draft beside the model.
    """
    size = config.page_size
    most = config.max_batch * max_context // size
    window, window_bytes = window_of(groups)
    span = max(config.chunk_tokens, (config.run_ahead + 1) * width) if window else 0
    each = min(most_pages(size, window, span), pages_for(max_context, size)) if window else 0
    wanted = each * config.max_batch * (3 if config.prefix_cache else 1)
    if config.kv_tokens is not None:
        pages = config.kv_tokens // size
    else:
        page_bytes, window_page_bytes = (bytes_per_token(groups) + draft_token_bytes) * size, window_bytes * size
        pages = memory // (page_bytes + window_page_bytes)
        if pages > wanted:
            pages = (memory - wanted * window_page_bytes) // page_bytes if page_bytes else most
        pages = min(pages, most)
    return PoolSizes(
        page_size=size,
        pages=pages,
        window_pages=min(pages, wanted),
        window=window,
        span=span,
        window_pages_each=each,
    )
