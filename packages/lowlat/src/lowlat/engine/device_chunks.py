"""Steps with prompt chunks on a device: the layers as one body over numbers that one copy brings.

Rows of chunks come first, then decode rows, whose tokens the device has, then padding: the numbers of rows and segments
are rounded up, so that few kinds of steps exist. The usual kinds are captured at the start and others when they come a
second time, where the device has graphs; what differs inside a kind (lengths, pages, where items begin) is data.

Legend of shape suffixes: R rows, B segments of chunks, C segments of decodes (one row each), H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PrefillChunk, StepPlan
from lowlat.engine.device_results import LabelReads
from lowlat.engine.device_state import DeviceState, PageTable
from lowlat.engine.graphs import StepBodies
from lowlat.layers.device_step import DeviceStep, ItemSegments, RowSegments
from lowlat.models.device_decoder import DeviceDecoder

_LEAST_ROWS = 16
_LEAST_SEGMENTS = 4
_SHORT_ROWS = 8
"""Attention has a smaller tile for segments of few rows, such as items that have a sequence each."""
_MOST_KINDS = 128
"""Kinds that are captured; a graph keeps its outputs and some memory of the driver's."""


def chunk_rows(count: int) -> int:
    """Rows that so many rows of chunks are computed with: few sizes, since each is captured twice at the start."""
    if count <= 128:
        return next(size for size in (_LEAST_ROWS, 64, 128) if size >= count)
    grain = max(128, _power_of_two(count) // 4)
    return -(-count // grain) * grain


def exact_rows(count: int) -> int:
    """Rows for a number that comes again and again: what `chunk_rows` adds would be a tenth of a step and more."""
    return chunk_rows(count) if count <= 128 else -(-count // 128) * 128


def decode_rows(count: int, most: int) -> int:
    """Decode rows beside chunks: none, a few, or as many as there may be."""
    return 0 if not count else min(most, 8) if count <= 8 else most


class ChunkKind(msgspec.Struct, frozen=True):
    """What is fixed when such a step is captured."""

    rows: int
    segments: int
    most_rows: int
    """Rows that no segment of a chunk exceeds; that of padding may."""
    decodes: int
    items: bool


class ChunkRows:
    """The rows of a plan as numbers, in the order in which the body takes them apart."""

    def __init__(
        self,
        plan: StepPlan,
        lengths: list[int],
        padding_slot: int,
        rounded: Callable[[int], int] = chunk_rows,
    ) -> None:
        """`lengths`: tokens of every slot before the step. The padding slot is the one behind all others. `rounded`:
        rows to compute so many rows of chunks with."""
        self._rows: list[tuple[Sequence[int] | np.ndarray, ...]] = []
        self._segments: list[tuple[int, int, int, int, int]] = []
        self._count = 0
        self._has_items = False
        for chunk in plan.chunks:
            self._add_chunk(chunk)
        self.decode_rows = range(self._count, self._count + len(plan.decodes))
        before = [lengths[slot] for slot in plan.decodes]
        self._rows.append(([-1] * len(before), plan.decodes, before, before, [0] * len(before)))
        self._count += len(before)
        self._decodes = np.zeros((4, decode_rows(len(before), padding_slot)), dtype=np.int32)
        self._decodes[:, : len(before)] = (
            plan.decodes, list(self.decode_rows), [1] * len(before), [length + 1 for length in before]
        )  # fmt: skip
        self.longest = max([length for *_, length, _ in self._segments] + self._decodes[3].tolist())
        self.kind = self._pad(padding_slot, rounded(self.decode_rows.start))

    def _add_chunk(self, chunk: PrefillChunk) -> None:
        start, count = chunk.start, len(chunk.tokens)
        places = np.arange(start, start + count)
        positions, begins = places, np.full(count, start + count)
        plain = count
        if chunk.items is not None:
            items, lengths = chunk.items, np.asarray(chunk.items.lengths)
            assert not items.done or len(lengths) == 1, "a chunk that goes on with an item has no other"
            self._has_items = True
            plain = count - int(lengths.sum())
            firsts = np.repeat(np.cumsum(lengths) - lengths, lengths) - items.done
            begins[plain:] = start + plain + firsts
            positions = places.copy()
            positions[plain:] = items.query + np.arange(count - plain) - firsts
            self._segments.append((chunk.slot, self._count + plain, count - plain, start + count, items.query))
        if plain:
            begins[:plain] = start + plain
            self._segments.append((chunk.slot, self._count, plain, start + plain, start + plain))
        self._rows.append((chunk.tokens, [chunk.slot] * count, positions, places, begins))
        self._count += count

    def _pad(self, padding_slot: int, rows: int) -> ChunkKind:
        """Round up, and add padding, which sees nothing: a segment of rows, and rows of decodes behind it."""
        fill = rows - self.decode_rows.start
        idle = range(len(self.decode_rows), self._decodes.shape[1])
        longest_segment = max(count for _, _, count, _, _ in self._segments)
        if fill:
            self._segments.append((padding_slot, self._count, fill, 0, 0))
        for place, entry in enumerate(idle, self._count + fill):
            self._decodes[:, entry] = (padding_slot, place, 1, 0)
        extra = fill + len(idle)
        self._rows.append(([0] * extra, [padding_slot] * extra, *([[0] * extra] * 3)))
        rows += self._decodes.shape[1]
        segments = max(_LEAST_SEGMENTS, _power_of_two(len(self._segments)))
        # Padding may exceed it: what lies beyond sees nothing either.
        short = longest_segment <= _SHORT_ROWS
        return ChunkKind(rows, segments, _SHORT_ROWS if short else rows, self._decodes.shape[1], self._has_items)

    def packed(self) -> np.ndarray:
        """All numbers behind one another, int32."""
        kind = self.kind
        segments_5B = np.zeros((5, kind.segments), dtype=np.int32)
        segments_5B[:, : len(self._segments)] = np.array(self._segments).T
        columns = [np.concatenate(parts) for parts in zip(*self._rows, strict=True)]
        packed: np.ndarray = np.concatenate([*columns, segments_5B.ravel(), self._decodes.ravel()]).astype(np.int32)
        return packed


class ChunkBodies:
    """Runs the layers of steps with chunks."""

    def __init__(self, model: DeviceDecoder, kv: KVPool, state: DeviceState, bodies: StepBodies) -> None:
        self._model = model
        self._kv = kv
        self._state = state
        self._bodies = bodies
        self._packed: dict[ChunkKind, torch.Tensor] = {}
        self._counts: Counter[int] = Counter()

    def rounded(self, count: int) -> int:
        """Rows to compute so many rows of chunks with: a size that was captured at the start, or its own where it comes
        for the third time."""
        exact = exact_rows(count)
        self._counts[exact] += 1
        return exact if self._counts[exact] > 2 else chunk_rows(count)

    def states(self, rows: ChunkRows) -> torch.Tensor:
        """Last states [R, H], ready for the head; the next step of the same kind writes them again."""
        kind, known = rows.kind, rows.kind in self._packed
        if not known:
            self._packed[kind] = self._padding(kind)

        def body() -> torch.Tensor:
            return self._layers(kind, rows.longest)

        captured = self._bodies.knows(kind)
        if known and not captured and len(self._packed) <= _MOST_KINDS:
            self._packed[kind].copy_(self._padding(kind))
            self._bodies.prepare(kind, body)
            captured = True
        source = torch.from_numpy(rows.packed())
        if self._state.device.type == "cuda":
            source = source.pin_memory()
        self._packed[kind].copy_(source, non_blocking=True)
        return self._bodies.run(kind, body) if captured else body()

    def prepare(self, rows: int) -> None:
        """Capture steps with chunks of up to so many rows, with and without decode rows, and compile what those with
        items need; on padding alone."""
        sizes = sorted({chunk_rows(count) for count in range(1, rows + 1)})
        for decodes in sorted({0, decode_rows(1, self._state.padding_slot)}):
            for size in sizes:
                self._prepare(self._plain(size, decodes))
            self._prepare(ChunkKind(sizes[0] + decodes, _LEAST_SEGMENTS, _SHORT_ROWS, decodes, False))
        for size in {sizes[0], sizes[-1]}:
            for items in (False, True) if not self._bodies.captured else (True,):
                kind = ChunkKind(size, _LEAST_SEGMENTS, size, 0, items)
                self._packed[kind] = self._padding(kind)
                self._layers(kind, 1)

    def replay(self, rows: int) -> None:
        """For measurements: a prepared step with a chunk of so many rows, on padding."""
        kind = self._plain(chunk_rows(rows), 0)
        self._packed[kind].copy_(self._padding(kind))
        self._bodies.run(kind, lambda: self._layers(kind, 1))

    @staticmethod
    def _plain(rows: int, decodes: int) -> ChunkKind:
        return ChunkKind(rows + decodes, _LEAST_SEGMENTS, rows + decodes, decodes, False)

    def _prepare(self, kind: ChunkKind) -> None:
        self._packed[kind] = self._padding(kind)
        self._bodies.prepare(kind, lambda: self._layers(kind, 1))

    def _padding(self, kind: ChunkKind) -> torch.Tensor:
        """The numbers of a step that is padding alone."""
        packed = np.zeros(5 * kind.rows + 5 * kind.segments + 4 * kind.decodes, dtype=np.int32)
        packed[kind.rows : 2 * kind.rows] = self._state.padding_slot
        segments_5B = packed[5 * kind.rows :][: 5 * kind.segments].reshape(5, -1)
        segments_5B[:3, 0] = self._state.padding_slot, 0, kind.rows
        return torch.from_numpy(packed).to(self._state.device)

    def _layers(self, kind: ChunkKind, longest: int) -> torch.Tensor:
        """The body. `longest` matters where it is not captured: the tokens that no request exceeds."""
        state, packed = self._state, self._packed[kind]
        split = [5 * kind.rows, 5 * kind.segments, 4 * kind.decodes]
        rows_5R, segments_5B, decodes_4C = packed.split(split)  # type: ignore[no-untyped-call]
        tokens_R, slots_R, positions_R, places_R, _ = rows_5R.long().view(5, -1).unbind()
        tokens_R = torch.where(tokens_R < 0, state.tokens_T[slots_R], tokens_R)
        slots_B, first_B, rows_B, lengths_B, prefix_B = segments_5B.view(5, -1).unbind()
        items = ItemSegments(prefix_B, rows_5R.view(5, -1)[4]) if kind.items else None
        batches = [RowSegments(slots_B, first_B, rows_B, lengths_B, kind.most_rows, longest, items)]
        if kind.decodes:
            slots_C, first_C, rows_C, lengths_C = decodes_4C.view(4, -1).unbind()
            batches.append(RowSegments(slots_C, first_C, rows_C, lengths_C, most_rows=1, longest=longest))

        def seen(table: PageTable) -> DeviceStep:
            where_R = table.places(slots_R, places_R)
            return DeviceStep(tokens_R, positions_R, where_R, batches, table.pages_TP, table.page_size, None)

        step = seen(state.table)
        if state.window_table is not None:
            step.windowed = seen(state.window_table)
        return self._model.states(step, self._kv)


def read_labels(
    model: DeviceDecoder, plan: StepPlan, states_RH: torch.Tensor, rows: list[int], send: Any, *, all_labels: bool
) -> LabelReads | None:
    """What the plan's chunks want to know of `rows`; None: nothing. Not `all_labels`: on ranks that bring their part of
    the logits and know no labels."""
    if not rows:
        return None
    chunks = [(chunk.slot, chunk.labels) for chunk in plan.chunks if chunk.read_rows]
    labels = [ids for _, some in chunks for ids in some]
    if not all_labels:
        label_logprobs(model, states_RH, rows, [[]] * len(rows), send)
        return None
    return LabelReads(label_logprobs(model, states_RH, rows, labels, send), chunks)


def label_logprobs(
    model: DeviceDecoder, states_RH: torch.Tensor, rows: list[int], labels: list[list[int]], send: Any
) -> torch.Tensor:
    """Log-probabilities of each row's labels, behind one another, and then for each row 1 where its logits are numbers.

    Float32, on the device; of the logits nothing else is kept. `send` brings a list of numbers to the device as int64.
    """
    found, usable = [], []
    for begin in range(0, len(rows), _READ_ROWS):
        some = labels[begin : begin + _READ_ROWS]
        flat = [(place, label) for place, ids in enumerate(some) for label in ids]
        numbers = send([*rows[begin : begin + _READ_ROWS], *(n for n, _ in flat), *(label for _, label in flat)])
        rows_M, place_L, label_L = numbers.split([len(some), len(flat), len(flat)])
        logits_MV = model.logits(states_RH.index_select(0, rows_M))
        total_M = logits_MV.logsumexp(-1)
        found.append(logits_MV[place_L, label_L] - total_M[place_L])
        usable.append(logits_MV.amax(-1).isfinite().float())
    return torch.cat(found + usable)


_READ_ROWS = 256
"""Rows whose logits exist at a time."""


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
