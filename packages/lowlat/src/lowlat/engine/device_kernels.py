"""Decode steps that a kernel library computes, inside the bodies of the runner whose state lives on the device.

A body takes the slots' states in one launch, runs the library's forward, chooses tokens (the library's own where all
rows are greedy and it offers them), and writes the states back in one launch. Sizes are exact: a library's rows need no
padding, and rows that repeat a request would read its cache twice.

Legend of shape suffixes: B requests, one row each; V vocabulary.
"""

from __future__ import annotations

import logging

import torch

from lowlat.engine.batch import StepPlan
from lowlat.engine.device_sampler import Samples, SamplingMode, choose
from lowlat.engine.device_state import DeviceState
from lowlat.layers.device_step import DeviceOps
from lowlat.layers.verify import VerifyRows
from lowlat_plugin import LowLatency, Mode, State, StepFailed, StepInputs
from lowlat_plugin.routing import SWITCHED_OFF, Route

log = logging.getLogger("lowlat.plugins")

PLAIN = SamplingMode()


class DeviceKernels:
    """A library that was proven, in front of one runner's states."""

    def __init__(self, low: LowLatency, state: DeviceState, ops: DeviceOps) -> None:
        self.low = low
        self._state = state
        self._ops = ops
        self._starts: dict[tuple[int, int], torch.Tensor] = {}

    def sizes(self, most: int) -> list[int]:
        """Requests of the decode steps that are covered, the largest first."""
        return [size for size in range(most, 0, -1) if self.low.route(Mode.DECODE, size, size).kernels]

    def route(self, plan: StepPlan, size: int | None = None, width: int = 1) -> Route:
        """Who computes a step of decodes alone, run with `size` requests of `width` rows."""
        size = len(plan.decodes) if size is None else size
        route = self.low.route(Mode.VERIFY if width > 1 else Mode.DECODE, size, size * width)
        return SWITCHED_OFF if plan.general and self.low.state is State.ACTIVE else route

    def reserve(self, size: int, width: int = 1) -> None:
        """Make what a body of this size keeps between runs."""
        if (size, width) not in self._starts:
            starts = torch.arange(0, size * width + 1, width, dtype=torch.int32, device=self._state.device)
            self._starts[size, width] = starts

    def decode(self, slots_B: torch.Tensor, mode: SamplingMode) -> Samples:
        """The body: everything between the slots' states before and after. Raises `StepFailed` before it writes any.

        Slots of padding are real rows to the library: one token at place 0 of the padding page, which no request reads.
        """
        state, table, size = self._state, self._state.table, len(slots_B)
        taken = self._ops.take_slots(slots_B, state.tokens_T, state.lengths_T, table.pages_TP, table.page_size)
        token_B, place_B, write_B, after_B, row_B = taken
        where = (token_B, place_B, self._starts[size, 1], after_B)
        logits_BV, samples = self._forward(Mode.DECODE, where, slots_B, row_B, write_B, mode)
        if samples is None:
            samples = choose(logits_BV, slots_B, place_B + 1, state, mode, self._ops)
        self._ops.put_tokens(slots_B, samples.tokens_M, state.tokens_T, state.lengths_T, state.padding_slot)
        if mode.rules:
            state.count(slots_B, samples.tokens_M.clamp(min=0))
        return samples

    def verify(
        self, slots_B: torch.Tensor, rows: VerifyRows, width: int, mode: SamplingMode
    ) -> tuple[torch.Tensor, Samples | None]:
        """The forward of a step that checks guesses: logits of all rows, and their greedy tokens where the library
        chose them and nothing else is wanted. Raises `StepFailed`."""
        slots = self._state.slots
        # Rows without a guess lie on the padding page here; to a library such a row has no place at all.
        write_R = rows.places_R.where(rows.places_R < slots.padding_page * slots.page_size, -1)
        where = (rows.tokens_R, rows.positions_R, self._starts[len(slots_B), width], rows.lengths_B)
        kind = Mode.VERIFY if width > 1 else Mode.DECODE
        return self._forward(kind, where, slots_B, rows.slots_B, write_R, mode)

    def _forward(
        self,
        kind: Mode,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        slots_B: torch.Tensor,
        slots32_B: torch.Tensor,
        write_R: torch.Tensor,
        mode: SamplingMode,
    ) -> tuple[torch.Tensor, Samples | None]:
        assert self.low.kernel is not None
        by_row, pages_TP = self.low.kernel.table_rows, self._state.table.pages_TP
        step = StepInputs(
            kind,
            *where,
            pages_TP if by_row else pages_TP.index_select(0, slots_B),
            write_R,
            table_rows_Q=slots32_B if by_row else None,
        )
        logits_RV = self.low.forward(step)
        greedy_R = self.low.kernel.greedy() if mode == PLAIN else None
        return logits_RV, None if greedy_R is None else Samples(greedy_R[: len(write_R)])

    def failed(self) -> bool:
        """Whether a step without numbers is the library's fault, which disables it. Waits for the device."""
        if self.low.state is State.FAILED:
            return True
        try:
            self.low.check()
        except StepFailed:
            return True
        return False
