"""Rows of items as attention wants them: a shared prefix, and batches of items of similar length."""

from __future__ import annotations

import numpy as np
import torch

from lowlat.engine.score_task import ItemRows
from lowlat.engine.slot_table import SlotTable
from lowlat.layers.step import ItemBatch, ItemGroup


class ItemPieces:
    """The rows `rows` of a step, which are the pieces `items` of a batch slot's request: the first row's token has its
    keys and values at place `start`."""

    def __init__(self, items: ItemRows, rows: range, slot: int, start: int) -> None:
        self._items, self._rows, self._slot, self._start = items, rows, slot, start
        lengths = np.asarray(items.lengths)
        firsts = np.cumsum(lengths) - lengths
        offsets_T = np.arange(len(rows)) - np.repeat(firsts, lengths)
        offsets_T[: lengths[0]] += items.done
        self.offsets_T = torch.from_numpy(offsets_T)
        places_T, begin = np.empty(len(rows), dtype=np.int64), 0
        self._batches: list[np.ndarray] = []
        for members in _similar(lengths):
            longest = int(lengths[members].max())
            inside_BL = np.arange(longest) < lengths[members][:, None]
            rows_BL = np.where(inside_BL, firsts[members][:, None] + np.arange(longest), firsts[members][:, None])
            places_T[rows_BL[inside_BL]] = begin + np.flatnonzero(inside_BL)
            self._batches.append(rows_BL)
            begin += rows_BL.size
        self._places_T = torch.from_numpy(places_T)

    def seen(self, table: SlotTable, window: int = 0) -> ItemGroup:
        """What attention needs, with the KV slots of `table`; with a `window`, of tokens that some rows see alone."""
        items, start, slot = self._items, self._start, self._slot
        return ItemGroup(
            first=self._rows.start,
            rows=len(self._rows),
            prefix=table.span(slot, 0, items.query, window),
            earlier=table.span(slot, start - items.done, start, window),
            first_rows=items.lengths[0],
            offsets_T=self.offsets_T,
            batches=[
                ItemBatch(torch.from_numpy(rows_BL), torch.from_numpy(table.slots[slot][start + rows_BL]))
                for rows_BL in self._batches
            ],
            places_T=self._places_T,
        )


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Items whose lengths differ at most by a factor of two, so that little is filled up."""
    order = np.argsort(lengths, kind="stable")
    groups, begin = [], 0
    while begin < len(order):
        end = int(np.searchsorted(lengths[order], 2 * lengths[order[begin]], side="right"))
        groups.append(order[begin:end])
        begin = end
    return groups
