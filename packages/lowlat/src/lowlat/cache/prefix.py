"""Pages for requests: what was computed before is found again, the rest is allocated as the request grows.

All cache groups with lifetime `all` share one pool: a page number means the same tokens in every such group, so one
page table a request serves them all (see docs/decisions/0104-one-page-number-for-all-groups.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lowlat.cache.groups import pages_for
from lowlat.cache.pages import OutOfPagesError, PagePool
from lowlat.cache.radix import Node, RadixTree
from lowlat.cache.sessions import Budget, Sessions
from lowlat.cache.snapshots import Snapshots
from lowlat.cache.windows import WindowPages, WindowSpan


class Lease:
    """The pages of one request, in order of its tokens.

    `private` pages belong to the request; the others belong to the prefix tree, where `node` is locked for them.
    """

    __slots__ = ("cached_tokens", "node", "pages", "private", "replayed", "restore", "salt", "window")

    def __init__(self, pages: list[int], node: Node, cached_tokens: int, salt: str) -> None:
        self.pages = pages
        self.node = node
        self.private: set[int] = set()
        self.cached_tokens = cached_tokens
        self.salt = salt
        self.restore = -1
        """State row to copy into the request's slot before its first step; -1: none."""
        self.replayed = 0
        """Cached tokens, the last ones, that run again because their prefix has no state."""
        self.window: WindowSpan | None = None
        """Its window pages, where layers have a window."""

    @property
    def start(self) -> int:
        """Position of the first row to compute."""
        return self.cached_tokens - self.replayed


class PrefixCache:
    """Page pool and prefix tree together.

    `enabled` false keeps the books but never shares anything. With `snapshots` (models that keep state for a request)
    a prefix is found only up to where a snapshot of its state was kept; with `windows` (models with sliding windows)
    only up to where the window before it is still there. Sessions may pin a `session_budget` part of each of them.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        enabled: bool = True,
        snapshots: Snapshots | None = None,
        windows: WindowPages | None = None,
        session_budget: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        replay: int = 0,
    ) -> None:
        """`replay`: tokens that run again (in whole pages) where a prefix is used that has no snapshot; 0: none is."""
        self.page_size = page_size
        self.replay_pages = pages_for(replay, page_size)
        self.windows = windows
        self.pool = PagePool(pages, windows.forget if windows is not None else None)
        self.snapshots = snapshots if enabled else None
        self.tree = RadixTree(self.pool, page_size, self.snapshots)
        self.enabled = enabled
        budget = Budget(
            pages=int(pages * session_budget) if enabled else 0,
            snapshots=int(snapshots.count * session_budget) if snapshots is not None else 0,
            window_pages=int(windows.total * session_budget) if windows is not None else 0,
        )
        self.sessions = Sessions(self.tree, windows, budget, self.longest, clock)

    @property
    def available(self) -> int:
        """Pages that could be handed out now, evicting what nobody uses and no session pins."""
        return self.pool.free + self.tree.evictable

    def begin(self, tokens: Sequence[int], salt: str = "", *, reuse: bool = True, reach: int = 0) -> Lease:
        """Start a request with `tokens`: lock the longest cached prefix that leaves at least one token to compute.

        Without `reuse`, all tokens are computed anew. `reach`: most tokens over which a step of this request may reach,
        where that may be more than chunks have.
        """
        reusable = (len(tokens) - 1) // self.page_size * self.page_size if self.enabled and reuse else 0
        pages, node, known = self.longest(tokens[:reusable], salt)
        self.tree.lock(node)
        lease = Lease(pages, node, len(pages) * self.page_size, salt)
        if self.windows is not None:
            lease.window = self.windows.begin(pages, known)
            self.windows.widen(lease.window, reach)
        if self.snapshots is not None and pages:
            if node.snapshot >= 0:
                lease.restore = self.snapshots.use(node)
            else:
                lease.replayed = self.replay_pages * self.page_size
        return lease

    def longest(self, tokens: Sequence[int], salt: str) -> tuple[list[int], Node, int]:
        """The longest cached prefix of `tokens` that a request can go on from.

        Returns its pages, the node where it ends, and how many pages the tree has of these tokens.
        """
        pages, node = self.tree.match(tokens, salt)
        if self.snapshots is not None:
            found, end = list(pages), node
            while node.parent is not None and node.snapshot < 0:
                del pages[len(pages) - len(node.pages) :]
                node = node.parent
            if self.replay_pages and len(found) - len(pages) > self.replay_pages:
                pages, node = found, end
        known = len(pages)
        if self.windows is not None and (reach := self.windows.reach(pages)) < known:
            pages, node = self.tree.match(tokens[: reach * self.page_size], salt)
        return pages, node, known

    def missing(self, lease: Lease, tokens: int) -> int:
        """Pages that `lease` lacks to hold `tokens` tokens."""
        return max(0, pages_for(tokens, self.page_size) - len(lease.pages))

    def fits(self, lease: Lease, tokens: int) -> bool:
        """Whether `extend` to `tokens` tokens would succeed."""
        windows, span = self.windows, lease.window
        has_window = windows is None or span is None or windows.missing(span, tokens) <= windows.available
        return has_window and self.missing(lease, tokens) <= self.available

    def make_room(self, lease: Lease, tokens: int) -> bool:
        """Whether `lease` `fits`, if need be after sessions have given up their pins."""
        return self.sessions.give_up_until(lambda: self.fits(lease, tokens))

    def extend(self, lease: Lease, tokens: int) -> int:
        """Let `lease` hold `tokens` tokens; returns how many pages were added.

        Evicts unused prefixes as needed, and then those that sessions pin. Raises `OutOfPagesError` when that is not
        enough; the request has what it had then.
        """
        count = pages_for(tokens, self.page_size) - len(lease.pages)
        if count <= 0:
            return 0
        self.make_room(lease, tokens)
        shortage = count - self.pool.free
        if shortage > max(0, self.tree.evictable):
            raise OutOfPagesError(shortage - self.tree.evictable)
        if self.windows is not None and lease.window is not None:
            self.windows.reserve(lease.window, tokens)
        if shortage > 0:
            # A little more than needed, so that a full pool does not search the tree in every step.
            self.tree.evict(min(self.tree.evictable, max(shortage, self.pool.total // 128)))
        pages = self.pool.take(count)
        lease.pages.extend(pages)
        lease.private.update(pages)
        return count

    def slide(self, lease: Lease, start: int, end: int) -> tuple[int, list[int]] | None:
        """See `WindowPages.slide`; None for models without windows."""
        if self.windows is None or lease.window is None:
            return None
        return self.windows.slide(lease.window, lease.pages, start, end)

    def share(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Offer the pages of `tokens`, whose keys and values are computed, to later requests."""
        if not self.enabled:
            return
        adopted, node = self.tree.insert(tokens, lease.pages, lease.salt)
        lease.private.difference_update(adopted)
        self.tree.lock(node)
        self.tree.unlock(lease.node)
        lease.node = node
        if lease.window is not None:
            lease.window.keep.update(range(lease.window.first, lease.window.end))

    def keep_state(self, lease: Lease, row: int) -> None:
        """Attach a state row, copied at the end of the last whole page that `lease` shared, to that prefix."""
        assert self.snapshots is not None
        if lease.node.parent is None:
            self.snapshots.give_back(row)
        else:
            self.snapshots.attach(row, lease.node)

    def end(self, lease: Lease, tokens: Sequence[int], state_row: int = -1) -> None:
        """End a request whose computed tokens are `tokens`; nothing may read or write its private pages any more.

        `state_row`: a held state row, copied where the last whole page of `tokens` ends.
        """
        self.share(lease, tokens)
        if state_row >= 0:
            self.keep_state(lease, state_row)
        if self.windows is not None and lease.window is not None:
            self.windows.end(lease.window, lease.pages)
            # Where the tree has pages of its own for these tokens, it takes over what is attached to the request's.
            for page, heir in zip(lease.pages, self.tree.path(lease.node), strict=False):
                if page != heir:
                    self.windows.hand_over(page, heir)
        self.tree.unlock(lease.node)
        self.pool.give_back(lease.private)
        lease.pages = []
        lease.private = set()

    def check(self) -> None:
        """Assert that every page is accounted for."""
        self.pool.check()
        self.tree.check()
        self.sessions.check()
        if self.snapshots is not None:
            self.snapshots.check()
        if self.windows is not None:
            self.windows.check()
        assert self.pool.free + self.pool.cached + self.pool.held == self.pool.total
