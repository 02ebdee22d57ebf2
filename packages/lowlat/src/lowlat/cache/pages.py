"""A pool of equal pages, each with exactly one owner at any time."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable


class Owner(enum.IntEnum):
    """Who answers for a page: nobody, one request, or the prefix tree."""

    FREE = 0
    HELD = 1
    CACHED = 2


class OutOfPagesError(Exception):
    """The pool has too few free pages; `missing` tells how many."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} pages too few")
        self.missing = missing


class PagePool:
    """Hands out page numbers 0 to `total` - 1, lowest first, so that a lone request gets neighbouring pages.

    Moving a page between owners checks the old owner: freeing twice or adopting a free page raises `ValueError`.
    """

    def __init__(self, total: int, freed: Callable[[int], None] | None = None) -> None:
        """`freed` is called with every page that nobody owns any more."""
        if total < 1:
            raise ValueError(f"a page pool needs at least one page, not {total}")
        self.total = total
        self._freed = freed
        self._owner = bytearray(total)
        self._free = list(range(total - 1, -1, -1))
        self._sorted = True
        self.held = 0
        self.cached = 0

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Give `count` free pages to a request. Raises `OutOfPagesError` and takes none when there are too few."""
        if count > len(self._free):
            raise OutOfPagesError(count - len(self._free))
        if count == 0:
            return []
        if not self._sorted:
            self._free.sort(reverse=True)
            self._sorted = True
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._owner[page] = Owner.HELD
        self.held += count
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages that a request held."""
        for page in pages:
            self._free_page(page, Owner.HELD)
            self.held -= 1

    def adopt(self, pages: Iterable[int]) -> None:
        """Pass pages from a request to the prefix tree."""
        for page in pages:
            self._move(page, Owner.HELD, Owner.CACHED)
            self.held -= 1
            self.cached += 1

    def evict(self, pages: Iterable[int]) -> None:
        """Free pages that the prefix tree owned."""
        for page in pages:
            self._free_page(page, Owner.CACHED)
            self.cached -= 1

    def owner(self, page: int) -> Owner:
        """Who owns `page` now."""
        return Owner(self._owner[page])

    def check(self) -> None:
        """Assert that the books balance."""
        counts = [self._owner.count(owner) for owner in Owner]
        assert counts == [self.free, self.held, self.cached], (counts, self.free, self.held, self.cached)
        assert len(set(self._free)) == self.free, "a page is free twice"
        assert all(self._owner[page] == Owner.FREE for page in self._free)

    def _free_page(self, page: int, old: Owner) -> None:
        self._move(page, old, Owner.FREE)
        self._free.append(page)
        self._sorted = False
        if self._freed is not None:
            self._freed(page)

    def _move(self, page: int, old: Owner, new: Owner) -> None:
        if self._owner[page] != old:
            raise ValueError(f"page {page} is {Owner(self._owner[page]).name}, expected {old.name}")
        self._owner[page] = new
