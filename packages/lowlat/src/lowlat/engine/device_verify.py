"""Decode steps that check guesses, on the device: draft, forward, choice and acceptance are one body, one graph.

A body has a fixed number of rows a request; `layers/verify.py` says which of them are real and which tokens count.

Legend of shape suffixes: B padded requests, W rows of a request, G = W - 1 guesses, R = B * W rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import msgspec
import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import StepPlan
from lowlat.engine.device_kernels import DeviceKernels
from lowlat.engine.device_results import PendingStep
from lowlat.engine.device_sampler import Samples, SamplingMode, choose
from lowlat.engine.device_speculation import DeviceSpeculation
from lowlat.engine.device_state import DeviceState, SlotLists, to_device
from lowlat.engine.executor import StepResult
from lowlat.engine.graphs import StepBodies
from lowlat.layers.device_step import DeviceStep, RowSegments
from lowlat.layers.verify import VerifyRows
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.speculative.device_draft import Guesses
from lowlat.speculative.step_times import StepTimes

_MEASURED = 4
"""Runs of each body whose best counts as its time."""


class Checked(msgspec.Struct):
    """What a step brought, on the device."""

    result_BX: torch.Tensor
    """As `verify.accept` returns it."""
    samples: Samples


class Verifier:
    """The bodies of one runner."""

    def __init__(
        self,
        model: DeviceDecoder,
        kv: KVPool,
        state: DeviceState,
        lists: SlotLists,
        bodies: StepBodies,
        speculation: DeviceSpeculation,
    ) -> None:
        self.speculation = speculation
        self._model, self._kv, self._state, self._lists, self._bodies = model, kv, state, lists, bodies
        self._forced_B: dict[int, torch.Tensor] = {}
        self.kernels: DeviceKernels | None = None
        """Where a kernel library computes forwards."""

    def use_kernels(self, kernels: DeviceKernels, sizes: list[int], modes: list[SamplingMode]) -> None:
        """Let a proven library compute the forwards that it covers: captures those bodies and measures them. Raises
        `StepFailed`."""
        self.kernels = kernels
        for size in sizes:
            times = self.speculation.times.get(size)
            seconds = {} if times is None else {width: times(width) for width in self.speculation.widths}
            covered = [width for width in self.speculation.widths if self._covered(size, width)]
            for width in covered:
                for mode in modes:
                    self._prepare(size, width, mode, on_kernels=True)
                seconds[width] = min(self._time(size, width, modes[0], on_kernels=True) for _ in range(_MEASURED))
            if covered and seconds:
                self.speculation.times[size] = StepTimes(seconds)

    def _covered(self, size: int, width: int) -> bool:
        return self.kernels is not None and self.kernels.route(StepPlan(0, [], [], [], []), size, width).kernels

    def prepare(self, sizes: list[int], modes: list[SamplingMode]) -> None:
        """Capture the bodies of these sizes and measure them."""
        for size in sizes:
            seconds = {}
            for width in self.speculation.widths:
                for mode in modes:
                    self._prepare(size, width, mode)
                seconds[width] = min(self._time(size, width, modes[0]) for _ in range(_MEASURED))
            self.speculation.times[size] = StepTimes(seconds)

    def run(
        self,
        slots: list[int],
        size: int,
        width: int,
        mode: SamplingMode,
        longest: int,
        forced: list[int] | None,
        *,
        on_kernels: bool = False,
    ) -> Checked:
        """Queue a step of these slots. `longest`: tokens that none exceeds after it. `forced`: tokens that count.

        Raises `StepFailed` with `on_kernels`; nothing has advanced then.
        """
        self._prepare(size, width, mode, on_kernels=on_kernels)
        self._lists.send(size, slots)
        if forced is not None:
            padded = forced + [0] * (size - len(slots))
            self._forced_B[size].copy_(to_device(padded, torch.int64, self._state.device), non_blocking=True)
        checked: Checked = self._bodies.run(*self.body(size, width, mode, longest, on_kernels))
        return checked

    def body(
        self, size: int, width: int, mode: SamplingMode, longest: int, on_kernels: bool
    ) -> tuple[Hashable, Callable[[], Checked]]:
        """Key and body of the step that `run` queues."""
        kernels = self.kernels if on_kernels else None
        return ("checks", size, width, mode, on_kernels), lambda: self._check(size, width, mode, longest, kernels)

    def _prepare(self, size: int, width: int, mode: SamplingMode, *, on_kernels: bool = False) -> None:
        if on_kernels and self.kernels is not None:
            self.kernels.reserve(size, width)
        if size not in self._forced_B:
            self._forced_B[size] = torch.zeros(size, dtype=torch.int64, device=self._state.device)
        key, body = self.body(size, width, mode, width, on_kernels)
        if not self._bodies.knows(key):
            self._lists.pad(size)
            self._bodies.prepare(key, body)

    def replay(self, size: int, mode: SamplingMode, width: int = 1, *, on_kernels: bool = False) -> None:
        """Queue a prepared step on padding, for measurements."""
        self._lists.pad(size)
        self._bodies.run(*self.body(size, width, mode, width, on_kernels))

    def _time(self, size: int, width: int, mode: SamplingMode, *, on_kernels: bool = False) -> float:
        """Seconds of a step, on padding."""
        clock, device = self.speculation.clock, self._state.device
        started = clock()
        self.replay(size, mode, width, on_kernels=on_kernels)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(1e-9, clock() - started)

    def _check(self, size: int, width: int, mode: SamplingMode, longest: int, kernels: DeviceKernels | None) -> Checked:
        """The body."""
        state, ops, slots_B = self._state, self._model.ops, self._lists.tensor(size)
        guesses_BG, counts_B = self._guesses(size, width, mode, longest)
        rows = ops.begin_rows(slots_B, state.slots, guesses_BG, counts_B)
        samples = None
        if kernels is not None:
            logits_RV, samples = kernels.verify(slots_B, rows, width, mode)
        else:
            batch = RowSegments(
                rows.slots_B, rows.first_B, rows.rows_B, rows.lengths_B, most_rows=width, longest=longest, tight=True
            )
            logits_RV = self._model.forward(self._step(rows, batch), self._kv)
        if samples is None:
            samples = choose(logits_RV, rows.slots_R, rows.next_R, state, mode, ops, guesses_BG)
        forced_B = self._forced_B[size] if self.speculation.simulated is not None else None
        result_BX = ops.accept(samples.tokens_M, rows, slots_B, state.slots, guesses_BG, forced_B)
        if mode.rules:
            counts_R = torch.arange(width, device=slots_B.device) < result_BX[:, :1]
            state.count(rows.slots_R, samples.tokens_M.clamp(min=0), counts_R.flatten())
        return Checked(result_BX, samples)

    def _guesses(self, size: int, width: int, mode: SamplingMode, longest: int) -> Guesses:
        slots_B = self._lists.tensor(size)
        if width == 1:
            return slots_B.view(size, 1)[:, 1:], None
        settings = (self._state.temperature_T, self._state.seed_T) if mode.draws else None
        guesses_BG, counts_B = self.speculation.draft.propose(slots_B, width - 1, longest, settings)
        return guesses_BG, counts_B if self.speculation.simulated is None else None

    def _step(self, rows: VerifyRows, batch: RowSegments) -> DeviceStep:
        table = self._state.table
        where = (rows.tokens_R, rows.positions_R)
        step = DeviceStep(*where, rows.places_R, [batch], table.pages_TP, table.page_size, None)
        if (windows := self._state.window_table) is not None:
            slots = self._state.slots
            real_R = rows.places_R < slots.padding_page * slots.page_size
            places_R = windows.places(rows.slots_R, rows.positions_R).where(
                real_R, windows.padding_page * table.page_size
            )
            step.windowed = DeviceStep(*where, places_R, [batch], windows.pages_TP, table.page_size, None)
        return step


class PendingChecks(PendingStep):
    """A launched step that checks guesses."""

    def __init__(
        self,
        step: int,
        checked: Checked,
        slots: list[int],
        wanted: list[int],
        device: torch.device,
        done: Callable[[list[list[int]], list[int]], tuple[float, float]],
        again: Callable[[PendingStep], bool] | None = None,
        *,
        fetch: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """As `PendingStep`, of results that are on the device yet. `done` hears of every slot's tokens and rows, and
        says what `StepResult.spent` and `plain` are."""
        self._told = done
        self._result_BX = fetch(checked.result_BX[: len(slots)])
        self._rows = checked.result_BX.shape[1] - 2
        samples = None
        if checked.samples.chosen_M is not None:
            samples = checked.samples.fetched(len(slots) * self._rows, fetch)
        super().__init__(step, samples, slots, wanted, device, lambda tokens: None, again=again, rows=self._rows)

    def _read(self) -> StepResult | None:
        bursts, rows, bad = [], [], []
        for slot, (count, of_request, *tokens) in zip(self._slots, self._result_BX.tolist(), strict=True):
            bursts.append(tokens[: max(0, count)])
            rows.append(of_request)
            if count < 0:
                bad.append(slot)
        if bad and self._again is not None and self._again(self):
            return None
        spent, plain = self._told(bursts, rows)
        tokens = [token for burst in bursts for token in burst]
        logprobs = None
        if self._samples is not None:
            every = self._logprobs(self._samples)
            assert every is not None
            firsts = range(0, len(every), self._rows)
            logprobs = [
                entry for first, burst in zip(firsts, bursts, strict=True) for entry in every[first:][: len(burst)]
            ]
        counts = list(map(len, bursts))
        guessed = sum(max(0, count - 1) for count in rows)
        result = StepResult(self._step, tokens, logprobs, counts=counts, guessed=guessed, bad_slots=bad)
        result.spent, result.plain = spent, plain
        return result
