"""Sessions: an agent's prefix stays cached while the agent waits for its tools.

A session pins the longest prefix that its last request computed. A pin protects pages from being evicted in favour of
newer prefixes, and from nothing else: see docs/decisions/0604-pins-yield-to-requests.md for who takes pages first.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from lowlat.cache.radix import Node, RadixTree
from lowlat.cache.windows import WindowPages

Find = Callable[[Sequence[int], str], tuple[list[int], Node, int]]
"""`PrefixCache.longest`."""

MOST_SESSIONS = 4096
"""Sessions may share pages, so the budget of pages alone does not bound how many are remembered."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How much sessions may pin, all together."""

    pages: int
    snapshots: int = 0
    """State rows, for models that keep snapshots."""
    window_pages: int = 0
    """For models with windows."""


class Session:
    """What is known of one session; `live` requests of it are waiting or running."""

    __slots__ = ("expires", "id", "live", "node", "salt", "tail", "ttl")

    def __init__(self, id: str, salt: str) -> None:
        self.id, self.salt = id, salt
        self.ttl = 0.0
        """Seconds, as the newest request asked."""
        self.live = 0
        self.expires = 0.0
        self.node: Node | None = None
        """End of the pinned prefix; None: no pin."""
        self.tail: list[int] = []
        """Its last pages, whose window pages are pinned with it."""


class Sessions:
    """Pins in one `RadixTree`, within a budget; with each pin goes what makes a hit at its end exact.

    A session is named by its id and its salt. `clock` gives seconds that never go back.
    """

    def __init__(
        self,
        tree: RadixTree,
        windows: WindowPages | None,
        budget: Budget,
        find: Find,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree, self._windows = tree, windows
        self._budget = budget
        self._find = find
        self._clock = clock
        self._known: OrderedDict[tuple[str, str], Session] = OrderedDict()
        """Least recently used first."""
        self._next_expiry = 0.0
        self.lost: Counter[str] = Counter()
        """Pins that were given up, by reason: `expired`, `ended`, `budget` or `pages`."""

    @property
    def pinned(self) -> int:
        """Sessions that hold a pin."""
        return sum(session.node is not None for session in self._known.values())

    def join(self, id: str, salt: str, ttl: float) -> Session:
        """A request of a session arrives; until it `leave`s, the session does not expire."""
        session = self._known.setdefault((salt, id), Session(id, salt))
        self._known.move_to_end((salt, id))
        session.ttl = ttl
        session.live += 1
        return session

    def leave(self, session: Session, tokens: Sequence[int] | None) -> None:
        """A request of `session` has ended. The pin moves to what it computed: `tokens`, which are in the tree as far
        as they fill pages. None: it computed nothing, and the pin stays where it is."""
        session.live -= 1
        if self._known.get((session.salt, session.id)) is not session:
            return  # it was ended meanwhile
        self._known.move_to_end((session.salt, session.id))
        if tokens is not None:
            self._move(session, tokens)
        session.expires = self._clock() + session.ttl
        self._next_expiry = min(self._next_expiry, session.expires)
        self._forget_empty(session)
        self._keep_budget()

    def end(self, id: str, salt: str) -> bool:
        """Forget a session; false when none of this id and salt is known. Its requests go on, and pin nothing."""
        session = self._known.pop((salt, id), None)
        if session is None:
            return False
        self._unpin(session, "ended")
        return True

    def expire(self) -> None:
        """Forget sessions without a live request whose time is over."""
        now = self._clock()
        if now < self._next_expiry:
            return
        for session in [one for one in self._known.values() if not one.live and one.expires <= now]:
            self._unpin(session, "expired")
            self._forget_empty(session)
        waiting = [session.expires for session in self._known.values() if not session.live]
        self._next_expiry = min(waiting, default=float("inf"))

    def give_up_until(self, enough: Callable[[], bool]) -> bool:
        """Give up pins, least recently used sessions first, until there is `enough` room; false when even all are not.

        Where giving up is no use, pins may be lost for nothing: the caller then takes pages from a request.
        """
        while not enough():
            session = self._least_recent()
            if session is None:
                return False
            self._unpin(session, "pages")
            self._forget_empty(session)
        return True

    def check(self) -> None:
        """Assert that the tree's pins are those of the sessions, and within the budget."""
        nodes = [session.node for session in self._known.values() if session.node is not None]
        above: Counter[Node] = Counter()
        for node in nodes:
            walk: Node | None = node
            while walk is not None:
                above[walk] += 1
                walk = walk.parent
        assert all(node.pins == count for node, count in above.items())
        assert sum(len(node.pages) for node in above) == self._tree.pinned_pages
        assert not self._over_budget()
        assert all(session.node is not None or session.live for session in self._known.values())
        if self._tree.snapshots is not None:
            assert all(node.snapshot >= 0 for node in nodes), "a pin without the state that makes its hit exact"
        if self._windows is not None:
            tails = Counter(page for session in self._known.values() for page in session.tail)
            assert tails == self._windows.pins

    def _move(self, session: Session, tokens: Sequence[int]) -> None:
        old, old_tail = session.node, session.tail
        pages, node, _ = self._find(tokens[: self._budget.pages * self._tree.page_size], session.salt)
        session.node, session.tail = None, []
        if node.parent is not None:
            self._tree.pin(node)
            session.node = node
            if self._windows is not None:
                session.tail = self._windows.pin(pages)
        if old is not None:
            self._release(old, old_tail)

    def _over_budget(self) -> bool:
        budget, windows = self._budget, self._windows
        return (
            self._tree.pinned_pages > budget.pages
            or (self._tree.snapshots is not None and self._pinned_ends() > budget.snapshots)
            or (windows is not None and len(windows.pins) > budget.window_pages)
        )

    def _keep_budget(self) -> None:
        while self._over_budget() or len(self._known) > MOST_SESSIONS:
            session = self._least_recent()
            if session is None:
                return
            self._unpin(session, "budget")
            self._forget_empty(session)

    def _pinned_ends(self) -> int:
        return len({session.node for session in self._known.values() if session.node is not None})

    def _least_recent(self) -> Session | None:
        return next((session for session in self._known.values() if session.node is not None), None)

    def _unpin(self, session: Session, reason: str) -> None:
        if session.node is not None:
            self._release(session.node, session.tail)
            session.node, session.tail = None, []
            self.lost[reason] += 1

    def _release(self, node: Node, tail: list[int]) -> None:
        if self._windows is not None:
            self._windows.unpin(tail)
        self._tree.unpin(node)

    def _forget_empty(self, session: Session) -> None:
        if session.node is None and not session.live:
            del self._known[session.salt, session.id]
