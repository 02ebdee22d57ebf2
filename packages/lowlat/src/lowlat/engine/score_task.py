"""What a scoring request asks of the engine: log-probabilities of named tokens after rows of its prompt.

A prompt may end with items. Each item sees what comes before all items (the query) and itself alone, as if it came
right after the query: many candidates are judged in one sequence, and the query is computed once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from lowlat.cache.windows import WindowPages


class ScoreTask(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a request that generates nothing (`max_tokens` 0)."""

    rows: list[int]
    """Places in the prompt, ascending: log-probabilities are those of the token after each."""
    labels: list[list[int]]
    """Token ids: one list for all rows, or a list for each."""
    items: list[int] = []
    """Tokens of each item, in order; together the end of the prompt. Empty: every row sees all rows before it."""


class ItemRows(msgspec.Struct):
    """Which rows of a prefill chunk belong to items: its last `sum(lengths)`, piece after piece."""

    query: int
    """Tokens before the first item: every row of an item sees them, and its positions go on from there."""
    done: int
    """Tokens of the first piece's item that earlier chunks computed."""
    lengths: list[int]
    """Rows of each piece; a piece is an item, or what a chunk holds of one that is longer than a chunk."""


class ScoreProgress:
    """How far the scoring of one request has come, and how its prompt is cut into chunks.

    Items of one chunk have no use for those of another, so all chunks write theirs to the same places, those after the
    query: what a request holds does not grow with the number of its items.
    """

    __slots__ = ("_ends", "_labels", "_rows", "items", "places", "query", "read")

    def __init__(self, prompt_tokens: int, task: ScoreTask, chunk_tokens: int) -> None:
        self._rows = task.rows
        self._labels = task.labels
        self.query = prompt_tokens - sum(task.items)
        """Tokens that every row sees, and that may be shared with later requests."""
        self._ends = list(accumulate(task.items, initial=self.query))
        """Where the query ends, and each item."""
        self.items = bool(task.items)
        longest = max(task.items, default=0)
        self.places = self.query + min(sum(task.items), max(chunk_tokens, longest))
        """Places for keys and values that the request needs."""
        self.read = 0
        """Rows whose labels are read, or on their way."""

    @property
    def reusable(self) -> int:
        """Tokens of the prompt of which all but the last may come from the prefix cache."""
        unread = self._rows[self.read] if self.read < len(self._rows) else self._ends[-1]
        return min(unread, self.query) + 1

    def start(self, launched: int) -> int:
        """Where the next chunk begins: after a preemption, items that are done are not computed again."""
        if launched < self.query or self.read == len(self._rows):
            return launched
        return max(launched, self._item_start(self._rows[self.read]))

    def place(self, row: int) -> int:
        """Where the keys and values of token `row` stand, if it begins a chunk."""
        return row if row < self.query else self.query + row - self._item_start(row)

    def _item_start(self, row: int) -> int:
        return self._ends[max(0, bisect_right(self._ends, row) - 1)]

    def end(self, start: int, end: int) -> int:
        """The last end of an item in a chunk [start, end), which may begin inside one; `end` where one is longer."""
        if start < self.query and self.start(self.query) > self.query:
            return min(end, self.query)
        if start > self.query and self._item_start(start) < start:
            return min(end, self._ends[bisect_right(self._ends, start)])
        last = self._ends[max(0, bisect_right(self._ends, end) - 1)]
        return last if start < last < end else end

    def take_rows(self, start: int, end: int) -> tuple[list[int], list[list[int]]]:
        """Rows of the chunk [start, end) to read now, counted from its start, and the labels of each."""
        first = self.read
        self.read = max(first, bisect_left(self._rows, end))
        rows = [row - start for row in self._rows[first : self.read]]
        return rows, self._labels * len(rows) if len(self._labels) == 1 else self._labels[first : self.read]

    def item_rows(self, start: int, end: int) -> ItemRows | None:
        """The pieces of items in the chunk [start, end); None where it has none."""
        if end <= self.query:
            return None
        begin = max(start, self.query)
        first_item = self._item_start(begin)
        inner = self._ends[bisect_right(self._ends, begin) : bisect_left(self._ends, end)]
        edges = [begin, *inner, end]
        lengths = [right - left for left, right in pairwise(edges)]
        return ItemRows(self.query, begin - first_item, lengths)


def begin_score(
    task: ScoreTask, prompt_tokens: int, max_tokens: int, chunk_tokens: int, windows: WindowPages | None
) -> ScoreProgress:
    """The progress of a task of which nothing is computed.

    `chunk_tokens`: most prompt tokens of a step. Raises `ValueError` where the task does not fit its request, or an
    item the windows.
    """
    _check_task(task, prompt_tokens, max_tokens)
    score = ScoreProgress(prompt_tokens, task, chunk_tokens)
    if windows is not None and windows.needs(score.places, score.places - score.query) > windows.total:
        raise ValueError(
            f"an item of {max(task.items)} tokens is too long to stand in one sequence with others: the "
            f"model's windows have room for {windows.total * windows.page_size} tokens; send it by itself"
        )
    return score


def _check_task(task: ScoreTask, prompt_tokens: int, max_tokens: int) -> None:
    rows: Sequence[int] = task.rows
    if max_tokens or not rows or len(task.labels) not in (1, len(rows)):
        raise ValueError("a score needs max_tokens 0, rows to read, and labels for all or for each of them")
    if rows[0] < 0 or rows[-1] >= prompt_tokens or any(left >= right for left, right in pairwise(rows)):
        raise ValueError("the rows of a score are ascending places in its prompt")
    if any(length < 1 for length in task.items) or sum(task.items) > prompt_tokens:
        raise ValueError("items have a token or more, and are the end of the prompt")
