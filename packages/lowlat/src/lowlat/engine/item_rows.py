"""Rows of items as attention wants them: a shared prefix, and batches of items of similar length."""

from __future__ import annotations

import numpy as np
import torch

from lowlat.engine.score_task import ItemRows
from lowlat.layers.step import ItemBatch, ItemGroup, KeySpan


def item_group(items: ItemRows, rows: range, kv_slots: np.ndarray, start: int, in_order: bool) -> ItemGroup:
    """The rows `rows` of a step, which are the pieces `items`.

    `kv_slots` are the KV slots of the request's tokens, of which `start` comes with the first row; `in_order` tells
    that they are neighbours in memory.
    """
    lengths = np.asarray(items.lengths)
    firsts = np.cumsum(lengths) - lengths
    offsets_T = np.arange(len(rows)) - np.repeat(firsts, lengths)
    offsets_T[: lengths[0]] += items.done
    batches, places_T, begin = [], np.empty(len(rows), dtype=np.int64), 0
    for members in _similar(lengths):
        longest = int(lengths[members].max())
        inside_BL = np.arange(longest) < lengths[members][:, None]
        rows_BL = np.where(inside_BL, firsts[members][:, None] + np.arange(longest), firsts[members][:, None])
        places_T[rows_BL[inside_BL]] = begin + np.flatnonzero(inside_BL)
        batches.append(ItemBatch(torch.from_numpy(rows_BL), torch.from_numpy(kv_slots[start + rows_BL])))
        begin += rows_BL.size
    return ItemGroup(
        first=rows.start,
        rows=len(rows),
        prefix=_span(kv_slots[: items.query], in_order),
        earlier=_span(kv_slots[start - items.done : start], in_order),
        first_rows=items.lengths[0],
        offsets_T=torch.from_numpy(offsets_T),
        batches=batches,
        places_T=torch.from_numpy(places_T),
    )


def _span(slots_P: np.ndarray, in_order: bool) -> KeySpan:
    run = int(slots_P[0]) if in_order and len(slots_P) else -1
    return KeySpan(len(slots_P), torch.from_numpy(slots_P), run)


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Items whose lengths differ at most by a factor of two, so that little is filled up."""
    order = np.argsort(lengths, kind="stable")
    groups, begin = [], 0
    while begin < len(order):
        end = int(np.searchsorted(lengths[order], 2 * lengths[order[begin]], side="right"))
        groups.append(order[begin:end])
        begin = end
    return groups
