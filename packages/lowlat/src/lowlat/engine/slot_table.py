"""Page tables on the host, spelled out: the KV slot of every token of every batch slot, and what a step sees of them.

Legend of shape suffixes: L tokens that a request's rows may see, B requests of a decode group.
"""

from __future__ import annotations

import numpy as np
import torch

from lowlat.layers.step import DecodeGroup, KeySpan, Segment


class SlotTable:
    """KV slots by batch slot and token.

    With a `window`, what it gives of a request are the tokens that some of its rows see, their own included; entries
    before them may be stale.
    """

    def __init__(self, max_batch: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots = np.zeros((max_batch, max_pages * page_size), dtype=np.int64)
        self._run_from = [0] * max_batch
        """From which token on the slots of a batch slot are neighbours in memory, in order."""

    def begin(self, slot: int) -> None:
        """Another request takes the batch slot."""
        self._run_from[slot] = 0

    def update(self, slot: int, first: int, pages: list[int]) -> None:
        """Learn the pages of a batch slot from its page number `first` on."""
        size = self.page_size
        starts = np.asarray(pages, dtype=np.int64) * size
        filled = (starts[:, None] + np.arange(size)).reshape(-1)
        row = self.slots[slot]
        end = first * size + len(filled)
        row[first * size : end] = filled
        low = max(0, first - 1) * size
        gaps = np.flatnonzero(np.diff(row[low:end]) != 1)
        if len(gaps):
            self._run_from[slot] = low + int(gaps[-1]) + 1

    def written(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """KV slots of (slot, first token, end) after one another."""
        return torch.from_numpy(np.concatenate([self.slots[slot, first:end] for slot, first, end in spans]))

    def segment(self, slot: int, rows: range, length: int, window: int = 0) -> Segment:
        """The last rows of a request of `length` tokens, and the tokens they see."""
        first = max(0, length - len(rows) + 1 - window) if window else 0
        slots = self.slots[slot, first:length]
        run = int(slots[0]) if self._run_from[slot] <= first else -1
        return Segment(rows.start, len(rows), length - first, torch.from_numpy(slots), run, slot)

    def span(self, slot: int, first: int, end: int, window: int = 0) -> KeySpan:
        """Tokens `first` to `end` - 1; with a `window`, those of them that the row at `end` sees."""
        first = max(first, end + 1 - window) if window else first
        slots = self.slots[slot, first:end]
        run = int(slots[0]) if self._run_from[slot] <= first < end else -1
        return KeySpan(end - first, torch.from_numpy(slots), run)

    def decode_groups(
        self, singles: list[tuple[int, int]], lengths: list[int], dtype: torch.dtype, window: int = 0
    ) -> list[DecodeGroup]:
        """Gather (slot, row) pairs of requests with one row, of which `lengths` (by slot) tokens came before.

        In a group they see numbers of tokens that differ at most by a factor of two, so that padding stays small.
        """

        def sees(slot: int) -> int:
            return min(lengths[slot] + 1, window) if window else lengths[slot] + 1

        order = sorted(singles, key=lambda single: sees(single[0]))
        groups: list[DecodeGroup] = []
        begin = 0
        for end in range(1, len(order) + 1):
            if end < len(order) and sees(order[end][0]) <= 2 * sees(order[begin][0]):
                continue
            members = sorted(order[begin:end], key=lambda single: single[1])
            slots, rows = [slot for slot, _ in members], [row for _, row in members]
            ends = np.array([lengths[slot] + 1 for slot in slots])
            groups.append(self._decode_group(slots, rows, ends, np.array([sees(slot) for slot in slots]), dtype))
            begin = end
        return groups

    def _decode_group(
        self, slots: list[int], rows: list[int], ends: np.ndarray, counts: np.ndarray, dtype: torch.dtype
    ) -> DecodeGroup:
        """One row for each of B requests, which sees the last `counts` tokens before its request's end."""
        longest = int(counts.max())
        first = int((ends - counts).max())
        if first == 0:
            kv_slots = self.slots[slots, :longest]
        else:
            tokens_BL = (ends - counts)[:, None] + np.arange(longest)
            kv_slots = self.slots[np.array(slots)[:, None], np.minimum(tokens_BL, ends[:, None] - 1)]
        mask = None
        if int(counts.min()) < longest:
            seen_BL = np.arange(longest) < counts[:, None]
            # Where a request has no token, its first one is read and masked: that slot was surely written.
            kv_slots = np.where(seen_BL, kv_slots, kv_slots[:, :1])
            mask = torch.zeros(seen_BL.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen_BL), float("-inf"))
            mask = mask[:, None, None, :]
        return DecodeGroup(torch.tensor(rows), torch.from_numpy(np.ascontiguousarray(kv_slots)), mask)
