"""Snapshots of per-request state at the ends of cached prefixes.

A model with `state` groups (windows, rings, token history) can resume a prefix only where its state was kept. State
rows beyond the batch's slots hold such copies; a radix node that ends there names its row.

A row may be given away at once when its node goes: plans are executed in order, so a copy out of it that was planned
earlier is made before a later plan writes it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowlat.cache.radix import Node


class Snapshots:
    """State rows `first` to `first + count` - 1: free, held by a request, or attached to a node."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._held: set[int] = set()
        self._attached: OrderedDict[int, Node] = OrderedDict()
        """Least recently used first."""

    def take(self) -> int | None:
        """A row for a request to copy its state to, if need be of the least recently used prefix.

        None: all are held, or belong to the ends of pinned prefixes.
        """
        if not self._free:
            loose = next((node for node in self._attached.values() if not node.ends_pin), None)
            if loose is not None:
                self.drop(loose)
        if not self._free:
            return None
        row = self._free.pop()
        self._held.add(row)
        return row

    def give_back(self, row: int) -> None:
        """Free a row that a request held."""
        self._held.remove(row)
        self._free.append(row)

    def attach(self, row: int, node: Node) -> None:
        """Pass a held row to the node whose end it belongs to; freed when the node has one already."""
        if node.snapshot >= 0:
            self.give_back(row)
            return
        self._held.remove(row)
        node.snapshot = row
        self._attached[row] = node

    def use(self, node: Node) -> int:
        """The row of a node, now the most recently used."""
        self._attached.move_to_end(node.snapshot)
        return node.snapshot

    def drop(self, node: Node) -> None:
        """The node's end is gone."""
        if node.snapshot >= 0:
            del self._attached[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = -1

    def check(self) -> None:
        """Assert that every row has one owner."""
        rows = sorted([*self._free, *self._held, *self._attached])
        assert rows == list(range(self.first, self.first + self.count)), rows
        assert all(node.snapshot == row for row, node in self._attached.items())
