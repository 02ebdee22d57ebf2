"""Where the rows of a step stand and what each of them sees: page tables on the host, and inputs made from them.

This is the packing of steps that run eagerly; rows of steps on a device are packed in `device_chunks`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PlanLimits, PrefillChunk, StepPlan
from lowlat.engine.item_rows import ItemPieces
from lowlat.engine.slot_table import SlotTable
from lowlat.layers.step import Segment, StepInputs
from lowlat.models.base import ModelCache, ReplayingCache


def padded_rows(rows: int) -> int:
    """The rows that a step of `rows` is computed with: all numbers up to 16, then eight an octave (decision 0102)."""
    grain = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // grain) * grain


class _Rows:
    """Rows of one step as they are added, in order; places are counted in tokens of the request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.written: list[tuple[int, int, int]] = []
        """(slot, first place, end) of what is written, row after row."""
        self.segments: list[tuple[int, range, int]] = []
        """(slot, rows, tokens of the request with them) of rows that are computed together."""
        self.singles: list[tuple[int, int]] = []
        """(slot, row) of requests with one row."""
        self.items: list[ItemPieces] = []
        self.sampled: list[int] = []
        self.scored: list[int] = []
        self.read: list[int] = []

    def add(self, slot: int, start: int, tokens: list[int]) -> range:
        """Rows of one request from place `start` on."""
        rows = range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens.extend(tokens)
        self.positions.extend(range(start, start + len(tokens)))
        self.written.append((slot, start, start + len(tokens)))
        return rows

    def add_chunk(self, chunk: PrefillChunk) -> None:
        """Rows of a prompt; those of items have positions behind the query, wherever they are written."""
        rows = plain = self.add(chunk.slot, chunk.start, chunk.tokens)
        if chunk.items is not None:
            plain = rows[: len(rows) - sum(chunk.items.lengths)]
            group = ItemPieces(chunk.items, range(plain.stop, rows.stop), chunk.slot, chunk.start + len(plain))
            self.positions[plain.stop :] = (group.offsets_T + chunk.items.query).tolist()
            self.items.append(group)
        if plain:
            self.segments.append((chunk.slot, plain, chunk.start + len(plain)))
        self.scored.extend(rows if chunk.targets else ())
        self.read.extend(rows[place] for place in chunk.read_rows)
        self.sampled.extend(rows[-1:] if chunk.sample else ())


class StepRows:
    """Page tables of all batch slots. Drafts with pools of their own use them too (`speculative.proposer.Tables`)."""

    def __init__(self, kv: ModelCache, limits: PlanLimits, *, min_rows: int, segments_only: bool, window: int) -> None:
        """`min_rows`: rows that a step has at least, padding included. `segments_only`: every request's rows are a
        segment of their own, as models need that keep state for a request. `window`: tokens that a row sees in layers
        with a window, its own too; 0: those have no pages of their own."""
        self.min_rows = min_rows
        self.segments_only = segments_only
        self.window = window
        self._kv = kv
        self._table = SlotTable(limits.max_batch, limits.max_pages, kv.layout.page_size)
        self._window_table = SlotTable(limits.max_batch if window else 0, limits.max_pages, kv.layout.page_size)
        # Models with state never group decodes, so they need no masks.
        self._dtype = kv.keys[0].dtype if isinstance(kv, KVPool) and kv.keys else torch.float32
        self._replays = [(0, 0)] * limits.max_batch
        """Of each slot: the position where its state begins, and the one from which its rows write to pages."""

    def learn(self, plan: StepPlan) -> None:
        """Take in the requests that begin, and page-table entries."""
        for slot, _ in plan.begins:
            self._table.begin(slot)
            if self.window:
                self._window_table.begin(slot)
            self._replays[slot] = (0, 0)
        for replay in plan.replays:
            assert isinstance(self._kv, ReplayingCache)
            self._replays[replay.slot] = (replay.start, replay.write_from)
            self._kv.begin_replay(replay.slot, replay.start, replay.before)
        for slot, first, pages in plan.pages:
            self._table.update(slot, first, pages)
        for slot, first, pages in plan.windows if self.window else ():
            self._window_table.update(slot, first, pages)

    def inputs(self, plan: StepPlan, newest: list[int], lengths: list[int], guesses: list[list[int]]) -> StepInputs:
        """The step's inputs. `newest` tokens and `lengths` are by slot; `guesses` by decode of the plan.

        Wanted are the logits of sampling chunks' last rows, decode rows, scored rows, and read rows, in this order.
        """
        rows = _Rows()
        for chunk in plan.chunks:
            rows.add_chunk(chunk)
        for slot, guessed in zip(plan.decodes, guesses, strict=True):
            length = lengths[slot]
            added = rows.add(slot, length, [newest[slot], *guessed])
            rows.sampled.extend(added)
            if guessed or self.segments_only:
                rows.segments.append((slot, added, length + len(added)))
            else:
                rows.singles.append((slot, added[0]))
        if len(rows.singles) == 1:
            slot, row = rows.singles.pop()
            rows.segments.append((slot, range(row, row + 1), lengths[slot] + 1))
        padding = [0] * (padded_rows(max(self.min_rows, len(rows.tokens))) - len(rows.tokens))
        step = StepInputs(
            tokens_R=torch.tensor(rows.tokens + padding),
            positions_R=torch.tensor(rows.positions + padding),
            write_slots=self._table.written(rows.written),
            real_rows=len(rows.tokens),
            segments=[self.segment(*segment) for segment in rows.segments],
            decodes=self._table.decode_groups(rows.singles, lengths, self._dtype),
            sample_rows=torch.tensor(rows.sampled + rows.scored + rows.read, dtype=torch.int64),
            items=[group.seen(self._table) for group in rows.items],
        )
        if self.window:
            table, window = self._window_table, self.window
            step.windowed = msgspec.structs.replace(
                step,
                write_slots=table.written(rows.written),
                segments=[table.segment(*segment, window) for segment in rows.segments],
                decodes=table.decode_groups(rows.singles, lengths, self._dtype, window),
                items=[group.seen(table, window) for group in rows.items],
            )
        return step

    def segment(self, slot: int, rows: range, length: int) -> Segment:
        """Rows of a request whose last is token `length - 1` (see `speculative.proposer.Tables`)."""
        segment = self._table.segment(slot, rows, length)
        segment.floor, segment.write_from = self._replays[slot]
        return segment

    def write_slots(self, slot: int, start: int, count: int) -> np.ndarray:
        """KV slots [count], int64, of `count` tokens of a batch slot from `start` on."""
        return self.kv_slots[slot, start : start + count]

    @property
    def kv_slots(self) -> np.ndarray:
        """The KV slot of every token, int64 [batch slot, token]; stale behind a request's pages."""
        return self._table.slots
