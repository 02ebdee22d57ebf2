"""The prefix cache: a radix tree from token sequences to pages of keys and values.

Edges hold whole pages, so a hit is always a whole number of pages. A request locks the node it matched, which protects
that node and all its ancestors. Eviction frees unlocked leaves, least recently used first, page by page from their end.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from lowlat.cache.pages import PagePool
from lowlat.cache.snapshots import Snapshots


class Node:
    """One edge of the tree: `tokens` (a whole number of pages), the `pages` that hold them, and what follows."""

    __slots__ = ("children", "last_use", "locks", "pages", "parent", "pins", "snapshot", "tokens")

    def __init__(self, tokens: list[int], pages: list[int], parent: Node | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0
        self.pins = 0
        """How many of the locks are pins of sessions, which may be taken back."""
        self.last_use = 0
        self.snapshot = -1
        """State row that holds a request's state at the end of this node; -1: none."""

    @property
    def ends_pin(self) -> bool:
        """Whether a session's pin ends here, and not only below."""
        return self.pins > sum(child.pins for child in self.children.values())


class RadixTree:
    """Cached prefixes of one cache group.

    Sequences of different `salt` never share anything. The tree owns its pages in `pool` (`Owner.CACHED`).
    """

    def __init__(self, pool: PagePool, page_size: int, snapshots: Snapshots | None = None) -> None:
        self.pool = pool
        self.snapshots = snapshots
        self.page_size = page_size
        self._roots: dict[str, Node] = {}
        self._clock = itertools.count(1)
        self.locked_pages = 0
        self.pinned_pages = 0

    def match(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], Node]:
        """Find the longest cached prefix of `tokens` in whole pages.

        Returns its pages and the node where it ends (a root when nothing matched). The node where the match ends is
        split if the match ends inside it, so that locking it locks exactly what matched.
        """
        node = self._root(salt)
        pages: list[int] = []
        now = next(self._clock)
        position = 0
        tokens = list(tokens)
        while True:
            node.last_use = now
            child = node.children.get(tuple(tokens[position : position + self.page_size]))
            if child is None:
                return pages, node
            common = self._common(child, tokens, position)
            if common < len(child.pages):
                child = self._split(child, common)
            pages.extend(child.pages)
            position += len(child.tokens)
            node = child

    @staticmethod
    def path(node: Node) -> list[int]:
        """All pages from the root to the end of `node`."""
        parts = []
        walk: Node | None = node
        while walk is not None:
            parts.append(walk.pages)
            walk = walk.parent
        return [page for part in reversed(parts) for page in part]

    def lock(self, node: Node) -> None:
        """Protect `node` and its ancestors from eviction, once more."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.locked_pages += len(walk.pages)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Take one `lock` of `node` back."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks < 1:
                raise ValueError("unlocking a prefix that is not locked")
            walk.locks -= 1
            if walk.locks == 0:
                self.locked_pages -= len(walk.pages)
            walk = walk.parent

    def pin(self, node: Node) -> None:
        """`lock` a node for a session."""
        self.lock(node)
        self._count_pin(node, 1)

    def unpin(self, node: Node) -> None:
        """Take one `pin` of `node` back."""
        self._count_pin(node, -1)
        self.unlock(node)

    def _count_pin(self, node: Node, change: int) -> None:
        walk: Node | None = node
        while walk is not None:
            before, walk.pins = walk.pins, walk.pins + change
            if not before or not walk.pins:
                self.pinned_pages += change * len(walk.pages)
            walk = walk.parent

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> tuple[list[int], Node]:
        """Cache `tokens` (cut to whole pages), held in `pages`.

        Pages for parts that were not cached yet pass from the request to the tree; parts already cached keep the
        tree's own pages, and the request's copies stay with the request. Returns the adopted pages and the node where
        `tokens` ends.
        """
        whole = len(tokens) // self.page_size
        tokens = list(tokens[: whole * self.page_size])
        matched, node = self.match(tokens, salt)
        rest = list(pages[len(matched) : whole])
        if not rest:
            return [], node
        self.pool.adopt(rest)
        leaf = Node(tokens[len(matched) * self.page_size :], rest, node)
        leaf.last_use = node.last_use
        node.children[tuple(leaf.tokens[: self.page_size])] = leaf
        return rest, leaf

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free now."""
        return self.pool.cached - self.locked_pages

    def evict(self, count: int) -> int:
        """Free at least `count` pages if so many are evictable; returns how many were freed."""
        order = itertools.count()
        heap = [(leaf.last_use, next(order), leaf) for leaf in self._leaves()]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, leaf = heapq.heappop(heap)
            take = min(len(leaf.pages), count - freed)
            if self.snapshots is not None:
                self.snapshots.drop(leaf)
            self.pool.evict(leaf.pages[len(leaf.pages) - take :])
            freed += take
            if take < len(leaf.pages):
                del leaf.pages[len(leaf.pages) - take :]
                del leaf.tokens[len(leaf.tokens) - take * self.page_size :]
                continue
            parent = leaf.parent
            assert parent is not None
            del parent.children[tuple(leaf.tokens[: self.page_size])]
            if parent.parent is not None and not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.last_use, next(order), parent))
        self._drop_empty_roots()
        return freed

    def clear(self) -> int:
        """Evict everything that is not locked, as after a change of weights; returns the pages freed."""
        return self.evict(self.evictable)

    def check(self) -> None:
        """Assert the tree's invariants: whole pages, no empty nodes, keys right, locks and page counts balance."""
        pages = locked = pinned = 0
        for node in self._nodes():
            assert node.parent is not None
            assert node.pages, "an empty node"
            assert len(node.tokens) == len(node.pages) * self.page_size
            assert node.parent.children[tuple(node.tokens[: self.page_size])] is node
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.locks >= node.pins >= sum(child.pins for child in node.children.values())
            pages += len(node.pages)
            locked += len(node.pages) if node.locks else 0
            pinned += len(node.pages) if node.pins else 0
        assert pages == self.pool.cached, (pages, self.pool.cached)
        assert locked == self.locked_pages, (locked, self.locked_pages)
        assert pinned == self.pinned_pages, (pinned, self.pinned_pages)

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node([], [], None)
        return root

    def _drop_empty_roots(self) -> None:
        # Salts come from clients: a root that holds nothing must not outlive its last request.
        for salt in [salt for salt, root in self._roots.items() if not root.children and root.locks == 0]:
            del self._roots[salt]

    def _common(self, child: Node, tokens: list[int], position: int) -> int:
        """Whole pages of `child` that equal `tokens` from `position` on (at least one)."""
        if tokens[position : position + len(child.tokens)] == child.tokens:
            return len(child.pages)
        page = 1
        while True:
            begin, end = page * self.page_size, (page + 1) * self.page_size
            if tokens[position + begin : position + end] != child.tokens[begin:end]:
                return page
            page += 1

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; returns the new upper part, which takes over its place."""
        parent = node.parent
        assert parent is not None
        cut = pages * self.page_size
        upper = Node(node.tokens[:cut], node.pages[:pages], parent)
        upper.locks, upper.pins = node.locks, node.pins
        upper.last_use = node.last_use
        parent.children[tuple(upper.tokens[: self.page_size])] = upper
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[pages:]
        node.parent = upper
        upper.children[tuple(node.tokens[: self.page_size])] = node
        return upper

    def _nodes(self) -> list[Node]:
        found = [child for root in self._roots.values() for child in root.children.values()]
        for node in found:
            found.extend(node.children.values())
        return found

    def _leaves(self) -> list[Node]:
        return [node for node in self._nodes() if not node.children and node.locks == 0]
