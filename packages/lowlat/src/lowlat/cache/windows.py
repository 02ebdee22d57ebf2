"""Pages of layers with a sliding window: a second pool, whose pages come and go as windows pass.

A page of the first pool stands for the same tokens in every cache group. A window page may be *attached* to it: it
holds those tokens' keys and values in the layers with a window. Attached pages are in use while the window of a request
may reach them, and idle afterwards: who needs a page takes a free one, then an idle one that nobody asked to keep, then
the one kept longest. So what was a prefix's end stays as long as there is room, and a prefix can be resumed where the
pages of a whole window before it are attached.

A page may be given away at once when a window has passed it: plans are executed in order, so the last step that reads
it runs before a later plan writes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from lowlat.cache.groups import pages_for
from lowlat.cache.pages import OutOfPagesError


class WindowSpan:
    """The window pages of one request: those attached to its pages `first` to `end` - 1."""

    __slots__ = ("end", "first", "keep", "most", "reserved", "sent")

    def __init__(self, first: int, end: int, most: int) -> None:
        self.first = first
        self.end = end
        self.most = most
        """Most window pages that the request needs at a time."""
        self.sent = first
        """Pages before this one are known to the device."""
        self.reserved = 0
        """Window pages that the request may have without asking again."""
        self.keep: set[int] = set()
        """Its pages whose window pages later requests may want."""


class WindowPages:
    """Window pages 0 to `total` - 1: free, or attached to a page of the first pool."""

    def __init__(self, total: int, page_size: int, window: int, span: int) -> None:
        """`window`: tokens that a row sees, its own included. `span`: most tokens from the earliest row that a step may
        have for a request to the end of what the step may write."""
        self.total = total
        self.page_size = page_size
        self.behind = window - 1 + page_size
        """Tokens before a row that stay: a window, and a page, so that the whole page before can be resumed too."""
        self.window = window
        self.most = most_pages(page_size, window, span)
        self.reserved = 0
        self._tail = pages_for(window - 1, page_size)
        self._attached: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self.pins: Counter[int] = Counter()
        """Pages whose window pages sessions pin, and how many do: requests cannot take these."""
        self._idle: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        # In order of release, so that a lone request's window pages are neighbours in memory nearly always.
        self._free = deque(range(total))

    @property
    def available(self) -> int:
        """Window pages that requests may still reserve."""
        return self.total - self.reserved - len(self.pins)

    @property
    def free(self) -> int:
        """Window pages that hold nothing."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Window pages that a request's window may reach."""
        return len(self._uses)

    def reach(self, pages: Sequence[int]) -> int:
        """How many of a prefix's `pages` can be resumed after: the window before that place is still there."""
        count = place = len(pages)
        while place > max(0, count - self._tail):
            place -= 1
            if pages[place] not in self._attached:
                count = place
        return count

    def begin(self, pages: Sequence[int], known: int) -> WindowSpan:
        """Use the window at the end of a prefix's `pages`, of which `reach` has said that it is there.

        `known`: pages that the prefix tree holds of these tokens. More than `pages` means that others came this way and
        their window is gone: this time it is kept.
        """
        span = WindowSpan(max(0, len(pages) - self._tail), len(pages), self.most)
        for page in pages[span.first :]:
            self._idle.pop(page, None)
            self._kept.pop(page, None)
            self._uses[page] = self._uses.get(page, 0) + 1
        span.keep.update(range(span.first, span.end))
        if known > len(pages):
            span.keep.update(range(max(0, known - self._tail), known))
        return span

    def widen(self, span: WindowSpan, rows: int) -> None:
        """Steps of this request may reach from a row over `rows` tokens, which may be more than for others."""
        span.most = max(self.most, most_pages(self.page_size, self.window, rows))

    def needs(self, tokens: int, rows: int) -> int:
        """Window pages that a request of `tokens` tokens needs at a time when its steps reach over `rows` tokens."""
        return min(pages_for(tokens, self.page_size), max(self.most, most_pages(self.page_size, self.window, rows)))

    def missing(self, span: WindowSpan, tokens: int) -> int:
        """Window pages that a request must still reserve to grow to `tokens` tokens."""
        return max(0, min(span.most, pages_for(tokens, self.page_size)) - span.reserved)

    def reserve(self, span: WindowSpan, tokens: int) -> None:
        """Let a request grow to `tokens` tokens. Raises `OutOfPagesError`, and changes nothing, when it cannot."""
        missing = self.missing(span, tokens)
        if missing > self.available:
            raise OutOfPagesError(missing - self.available)
        span.reserved += missing
        self.reserved += missing

    def slide(self, span: WindowSpan, pages: Sequence[int], start: int, end: int) -> tuple[int, list[int]] | None:
        """Move a window on: rows from position `start` on come next, and write up to `end`; both only ever grow.

        Returns what the device must learn, (index of a page, window pages from there on), or None.
        """
        first = max(0, start - self.behind) // self.page_size
        for index in range(span.first, first):
            self._release(pages[index], index in span.keep)
        span.first = max(span.first, first)
        for index in range(span.end, pages_for(end, self.page_size)):
            self._attached[pages[index]] = self._take()
            self._uses[pages[index]] = 1
            span.end = index + 1
        assert span.end - span.first <= span.reserved, "a window holds more pages than it asked for"
        sent = max(span.sent, span.first)
        if sent >= span.end:
            return None
        span.sent = span.end
        return sent, [self._attached[page] for page in pages[sent : span.end]]

    def end(self, span: WindowSpan, pages: Sequence[int]) -> None:
        """A request leaves its window: what is there is kept for the next one."""
        for page in pages[span.first : span.end]:
            self._release(page, kept=True)
        span.first = span.end
        self.reserved -= span.reserved
        span.reserved = 0

    def pin(self, pages: Sequence[int]) -> list[int]:
        """Keep the window at the end of a prefix's `pages`, of which `reach` has said that it is there, from requests.

        Returns the pages to `unpin` later.
        """
        tail = list(pages[max(0, len(pages) - self._tail) :])
        for page in tail:
            self.pins[page] += 1
            self._idle.pop(page, None)
            self._kept.pop(page, None)
        return tail

    def unpin(self, tail: Sequence[int]) -> None:
        """Take one `pin` back."""
        for page in tail:
            self.pins[page] -= 1
            if not self.pins[page]:
                del self.pins[page]
                if page not in self._uses:
                    self._kept[page] = None

    def hand_over(self, page: int, heir: int) -> None:
        """Attach the idle window page of `page` to `heir`, which holds the same tokens, unless it has one."""
        if page not in self._attached or heir in self._attached:
            return
        self._attached[heir] = self._attached.pop(page)
        kept = page in self._kept
        (self._kept if kept else self._idle).pop(page)
        (self._kept if kept else self._idle)[heir] = None

    def forget(self, page: int) -> None:
        """`page` is free, and so is the window page attached to it."""
        window_page = self._attached.pop(page, None)
        if window_page is not None:
            assert page not in self._uses, "a page is freed while a window may reach it"
            self._idle.pop(page, None)
            self._kept.pop(page, None)
            self._free.append(window_page)

    def check(self) -> None:
        """Assert that every window page is free, in use or idle, and that no one uses more than was reserved."""
        assert sorted([*self._free, *self._attached.values()]) == list(range(self.total))
        assert sorted([*(self._uses.keys() | self.pins.keys()), *self._idle, *self._kept]) == sorted(self._attached)
        assert self.available >= 0, "pins and reservations are more than there is"
        assert all(uses > 0 for uses in self._uses.values())
        assert self.in_use <= self.reserved <= self.total, (self.in_use, self.reserved, self.total)

    def _take(self) -> int:
        if self._free:
            return self._free.popleft()
        idle = self._idle or self._kept
        page = next(iter(idle))
        del idle[page]
        return self._attached.pop(page)

    def _release(self, page: int, kept: bool) -> None:
        self._uses[page] -= 1
        if self._uses[page] == 0:
            del self._uses[page]
            if page in self.pins:
                return
            (self._kept if kept else self._idle)[page] = None


def most_pages(page_size: int, window: int, span: int) -> int:
    """Most window pages that a request needs at a time; `window` and `span` as `WindowPages` has them."""
    return (window - 1 + page_size + span + page_size - 2) // page_size + 1
