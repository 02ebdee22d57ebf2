"""Decode steps that check no guesses, on the device: one token a request, by the model or by a kernel library.

Legend of shape suffixes: B padded requests, one row each; C columns of the last product on this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

from lowlat.cache.layout import KVPool
from lowlat.engine.device_choice import GroupChoice
from lowlat.engine.device_kernels import DeviceKernels
from lowlat.engine.device_sampler import Samples, SamplingMode
from lowlat.engine.device_state import DeviceState, SlotLists
from lowlat.engine.graphs import Body, StepBodies
from lowlat.layers.device_step import DeviceStep, RowSegments
from lowlat.models.device_decoder import DeviceDecoder

log = logging.getLogger("lowlat.engine")


def padded_requests(requests: int, most: int) -> int:
    """The size that a decode step of so many requests is run with: a power of two, at most `most`."""
    return min(most, 1 << (requests - 1).bit_length())


class DecodeBodies:
    """The bodies of one runner."""

    def __init__(
        self,
        model: DeviceDecoder,
        kv: KVPool,
        state: DeviceState,
        lists: SlotLists,
        bodies: StepBodies,
        choice: GroupChoice,
    ) -> None:
        self._model, self._kv, self._state, self._lists, self._bodies = model, kv, state, lists, bodies
        self._choice = choice
        self.kernels: DeviceKernels | None = None
        """Where a kernel library computes whole steps."""

    def use_kernels(self, kernels: DeviceKernels, sizes: list[int], modes: list[SamplingMode]) -> None:
        """Let a proven library compute the steps that it covers: captures those bodies. Raises `StepFailed`."""
        self.kernels = kernels
        for size in sizes:
            for mode in modes:
                self._prepare(size, mode, on_kernels=True)

    def prepare(self, sizes: list[int], modes: list[SamplingMode]) -> None:
        """Capture the model's bodies of these sizes."""
        for size in sizes:
            for mode in modes:
                self._prepare(size, mode)

    def run(
        self, slots: list[int], size: int, mode: SamplingMode, longest: int, *, on_kernels: bool = False
    ) -> Samples:
        """Queue a step of these slots, padded to `size`. `longest`: tokens that none exceeds after it.

        Raises `StepFailed` with `on_kernels`; nothing has advanced then.
        """
        key, body = self.body(size, mode, longest, on_kernels=on_kernels)
        if not self._bodies.knows(key):
            self._prepare(size, mode, on_kernels=on_kernels)
        self._lists.send(size, slots)
        samples: Samples = self._bodies.run(key, body)
        return samples

    def replay(self, size: int, mode: SamplingMode) -> None:
        """Queue a prepared step of the model on padding, for measurements."""
        self._lists.pad(size)
        self._bodies.run(*self.body(size, mode, 1))

    def body(self, size: int, mode: SamplingMode, longest: int, *, on_kernels: bool = False) -> tuple[Hashable, Body]:
        """Key and body of the step that `run` queues."""
        if not on_kernels:
            return (size, mode), lambda: self._decode(size, mode, longest)
        kernels = self.kernels
        assert kernels is not None
        kernels.reserve(size)
        return ("kernels", size, mode), lambda: kernels.decode(self._lists.tensor(size), mode)

    def _prepare(self, size: int, mode: SamplingMode, *, on_kernels: bool = False) -> None:
        key, body = self.body(size, mode, 1, on_kernels=on_kernels)
        if self._bodies.knows(key):
            return
        self._lists.pad(size)
        self._bodies.prepare(key, body)
        if self._bodies.knows(key):
            log.info("captured decode steps of %d requests, %s%s", size, mode, ", on kernels" if on_kernels else "")

    def _decode(self, size: int, mode: SamplingMode, longest: int) -> Samples:
        """The model's body: everything between the slots' states before and after. `longest` matters where it is not
        captured: the tokens that no request exceeds."""
        state, slots_B = self._state, self._lists.tensor(size)
        tables = [table for table in (state.table, state.window_table) if table is not None]
        rows = self._model.ops.begin_decodes(
            slots_B,
            state.padding_slot,
            state.tokens_T,
            state.lengths_T,
            [(table.pages_TP, table.page_size) for table in tables],
        )
        segments = (rows.slots32_B, rows.first32_B, rows.rows32_B, rows.lengths32_B)
        batch = RowSegments(*segments, most_rows=1, longest=longest)
        steps = [
            DeviceStep(rows.tokens_B, rows.before_B, places_B, [batch], table.pages_TP, table.page_size, None)
            for places_B, table in zip(rows.places, tables, strict=True)
        ]
        steps[0].windowed = steps[1] if steps[1:] else None
        columns_BC = self._model.columns(steps[0], self._kv)
        return self._choice.take(columns_BC, slots_B, rows.after_B, mode)
