"""The shadow check: run kernels and the general forward on the same step and measure how far apart they are.

The inputs are as unkind as serving is: contexts from a real prefill of random tokens at three lengths, pages in random
order, every entry that must not be read filled with noise, padding rows that point at a page of NaN, and logits buffers
that hold NaN before the step. Shape suffixes as in `steps.py`; L layers, W watched slots.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lowlat_plugin.deadline import call_within
from lowlat_plugin.host import Host
from lowlat_plugin.kernel import Kernel
from lowlat_plugin.numerics import Measurement, greedy, measure, measure_selection
from lowlat_plugin.reasons import Code, Reason, raised
from lowlat_plugin.spec import Bound, Metric, Mode, Numerics
from lowlat_plugin.steps import Shape, StepInputs, StepOutputs

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (2, 17, 37)
WATCHED_BYTES = 8 << 20
LATE_MEMORY_BYTES = 8 << 20
STRICT = Bound(Metric.BITWISE)


class ShapeResult(msgspec.Struct, frozen=True):
    """What one shape's shadow step showed. Empty reasons mean that the promise held."""

    shape: str
    measurements: tuple[Measurement, ...]
    reasons: tuple[Reason, ...] = ()


@dataclass(slots=True)
class _Request:
    tokens: list[int]
    pages: list[int]


class Shadow:
    """A prepared set of contexts that shapes are checked on, one after another.

    Raises ValueError when the pool has too few free pages to hold even the shortest contexts.
    """

    def __init__(
        self, host: Host, shapes: Iterable[Shape], lengths: Sequence[int] = LENGTHS, seed: int = 0, prefill: bool = True
    ) -> None:
        self.host = host
        self.binding = host.binding()
        self._random = random.Random(seed)
        shapes = list(shapes)
        requests = max((shape.requests for shape in shapes), default=0)
        self._rows = max((-(-shape.rows // shape.requests) for shape in shapes), default=1)
        self._requests = self._allocate(requests, lengths)
        self._watch()
        if prefill and self._requests:
            parts = [(request, 0, len(request.tokens)) for request in self._requests]
            self.host.general(self._without_nan(self._step(Mode.PREFILL, parts)))

    def check(self, kernel: Kernel, numerics: Numerics, shape: Shape, seconds: float) -> ShapeResult:
        """Run one shape both ways and compare. Nothing the kernels do escapes as an exception."""
        reasons: list[Reason] = []
        measurements: list[Measurement] = []
        try:
            step = self.step(shape)
            general, general_kv = self._run_general(step)
            measurements = self._against(kernel, numerics, step, general, general_kv, seconds, reasons)
            if shape.requests > 1:
                measurements += self._padded(kernel, numerics, shape, step, general, seconds, reasons)
        except Exception as error:
            reasons.append(raised(f"shadow step {shape}", error))
        beyond = [m for m in measurements if not m.ok]
        reasons += [Reason(Code.NUMERICS, f"{shape} {m.output}", _found(m), _wanted(m)) for m in beyond]
        return ShapeResult(str(shape), tuple(measurements), tuple(reasons))

    def close(self) -> None:
        """Leave zeros, so that a masked read of an unused entry can never meet NaN."""
        for pool in self._pools():
            pool.index_fill_(0, self._watched_W, 0)

    # -- contexts ----------------------------------------------------------------------------------------------------

    def _allocate(self, requests: int, lengths: Sequence[int]) -> list[_Request]:
        free = list(self.host.scratch_pages())
        self._random.shuffle(free)
        size = self.binding.layout.page_size
        room = (len(free) - 1) // max(requests, 1) * size - self._rows
        if room < 1:
            raise ValueError(f"{len(free)} free pages are too few for a shadow check of {requests} requests")
        self._nan_page = free.pop()
        made = []
        for index in range(requests):
            length = min(lengths[index % len(lengths)], room)
            pages = [free.pop() for _ in range(-(-(length + self._rows) // size))]
            tokens = [self._random.randrange(self.host.vocab_size) for _ in range(length)]
            made.append(_Request(tokens, pages))
        self._unused = free
        return made

    def _watch(self) -> None:
        """Fill every entry that could be touched wrongly with noise, as many as fit the limit, used pages first."""
        import torch

        size = self.binding.layout.page_size
        first = self.binding.layers[0].k_SHD
        slot_bytes = 2 * len(self.binding.layers) * first[0].numel() * first.element_size()
        used = [page for request in self._requests for page in request.pages]
        unused = set(self._unused)
        near = [page + side for page in used for side in (-1, 1) if page + side in unused]
        more = list(dict.fromkeys([*near, *self._unused]))[: max(8, WATCHED_BYTES // (slot_bytes * size))]
        pages = torch.tensor([*used, *more], device=self.host.device)
        self._watched_W = (pages[:, None] * size + torch.arange(size, device=self.host.device)).flatten()
        nan_slots = torch.arange(size, device=self.host.device) + self._nan_page * size
        self._watched_W = torch.cat([self._watched_W, nan_slots])
        for index, pool in enumerate(self._pools()):
            noise = _noise(pool[self._watched_W].shape, pool, index)
            pool.index_copy_(0, self._watched_W, noise)
            pool.index_fill_(0, nan_slots, float("nan"))

    def _pools(self) -> list[Tensor]:
        return [pool for layer in self.binding.layers for pool in (layer.k_SHD, layer.v_SHD)]

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, shape: Shape) -> StepInputs:
        """A step of this shape that continues the prepared contexts with tokens drawn afresh."""
        each, extra = divmod(shape.rows, shape.requests)
        parts = []
        for index, request in enumerate(self._requests[: shape.requests]):
            parts.append((request, len(request.tokens), each + (index < extra)))
        return self._step(shape.mode, parts)

    def _step(self, mode: Mode, parts: Sequence[tuple[_Request, int, int]]) -> StepInputs:
        """Rows `start` to `start + count` of each request; tokens beyond its prompt are drawn afresh."""
        import torch

        size = self.binding.layout.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        for request, start, count in parts:
            drawn = [self._random.randrange(self.host.vocab_size) for _ in range(count)]
            tokens += request.tokens if mode is Mode.PREFILL else drawn
            positions += range(start, start + count)
            slots += [request.pages[p // size] * size + p % size for p in range(start, start + count)]
            starts.append(starts[-1] + count)
            lengths.append(start + count)
        widest = max(len(request.pages) for request, _, _ in parts)
        table = [request.pages + [self._nan_page] * (widest - len(request.pages)) for request, _, _ in parts]

        def on_device(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.host.device)

        return StepInputs(
            mode,
            on_device(tokens, torch.int64),
            on_device(positions, torch.int64),
            on_device(starts, torch.int32),
            on_device(lengths, torch.int32),
            on_device(table, torch.int32),
            on_device(slots, torch.int64),
        )

    def _pad_last(self, step: StepInputs) -> tuple[StepInputs, int]:
        """The same step with its last request turned into padding; also how many rows are left real."""
        real = int(step.query_start_Q1[-2])
        slots, lengths, table = step.write_slots_R.clone(), step.lengths_Q.clone(), step.page_table_QP.clone()
        positions, tokens = step.positions_R.clone(), step.token_ids_R.clone()
        slots[real:], lengths[-1], table[-1] = -1, 0, self._nan_page
        positions[real:], tokens[real:] = 0, 0
        return StepInputs(step.mode, tokens, positions, step.query_start_Q1, lengths, table, slots), real

    # -- runs --------------------------------------------------------------------------------------------------------

    def _run_general(self, step: StepInputs, forced: Mapping[str, Tensor] | None = None) -> tuple[StepOutputs, Tensor]:
        before = self._written(step.write_slots_R)
        outputs = self.host.general(self._without_nan(step), forced)
        self.host.synchronize()
        written_LRE = self._written(step.write_slots_R)
        self._restore(step.write_slots_R, before)
        return outputs, written_LRE

    def _without_nan(self, step: StepInputs) -> StepInputs:
        """The general path may gather a whole table and mask it afterwards, and NaN survives a mask."""
        tables = step.page_table_QP.masked_fill(step.page_table_QP == self._nan_page, self._requests[0].pages[0])
        return dataclasses.replace(step, page_table_QP=tables, logits_RV=None)

    def _against(
        self,
        kernel: Kernel,
        numerics: Numerics,
        step: StepInputs,
        general: StepOutputs,
        general_kv: Tensor,
        seconds: float,
        reasons: list[Reason],
    ) -> list[Measurement]:
        logits, kv = self._run_kernels(kernel, step, seconds, reasons)
        chosen = kernel.selections()
        found = [
            measure_selection(f"selection {name}", numerics.tie_margin, selection, chosen[name].indices)
            for name, selection in general.selections.items()
            if name in chosen
        ]
        missing = sorted(set(general.selections) ^ set(chosen))
        if missing:
            reasons.append(
                Reason(Code.NUMERICS, "selections", f"only one side has {missing}", "both sides name the same")
            )
        if chosen:
            forced = {name: selection.indices for name, selection in chosen.items()}
            general, general_kv = self._run_general(step, forced)
        token = greedy(general.logits_RV)
        found.append(measure_selection("greedy token", numerics.tie_margin, token, logits.argmax(-1, keepdim=True)))
        found.append(measure("logits", numerics.bounds.get("logits", STRICT), general.logits_RV, logits))
        found.append(measure("kv", numerics.bounds.get("kv", STRICT), general_kv, kv))
        state = kernel.state()
        for name, reference in general.state.items():
            if name in state:
                found.append(measure(name, numerics.bounds.get(name, STRICT), reference, state[name]))
            else:
                reasons.append(Reason(Code.NUMERICS, f"state {name}", "not given by the kernels", "given"))
        return found

    def _padded(
        self,
        kernel: Kernel,
        numerics: Numerics,
        shape: Shape,
        step: StepInputs,
        general: StepOutputs,
        seconds: float,
        reasons: list[Reason],
    ) -> list[Measurement]:
        padded, real = self._pad_last(step)
        logits, _ = self._run_kernels(kernel, padded, seconds, reasons)
        if kernel.selections():
            return []
        bound = numerics.bounds.get("logits", STRICT)
        return [measure("logits beside padding", bound, general.logits_RV[:real], logits[:real])]

    def _run_kernels(
        self, kernel: Kernel, step: StepInputs, seconds: float, reasons: list[Reason]
    ) -> tuple[Tensor, Tensor]:
        """Run and look: what was written where it should be, and whether anything else changed."""
        import torch

        step.logits_RV = torch.full(
            (step.token_ids_R.shape[0], self.host.vocab_size), float("nan"), device=self.host.device
        )
        slots = step.write_slots_R[step.write_slots_R >= 0]
        before = [pool[self._watched_W] for pool in self._pools()]
        held = self.host.memory_bytes()
        self.host.synchronize()
        given, what = dataclasses.replace(step), f"{kernel.spec.name} step {step.shape}"
        logits = call_within(2 * seconds, what, lambda: self._forward(kernel, given))
        grown = (self.host.memory_bytes() or 0) - (held or 0)
        if logits.data_ptr() != step.logits_RV.data_ptr():
            grown -= logits.numel() * logits.element_size()  # what is handed over is not kept
        if held is not None and grown > LATE_MEMORY_BYTES:
            reasons.append(
                Reason(Code.LATE_MEMORY, f"step {step.shape}", f"{grown} bytes", "all memory taken in build()")
            )
        chosen = kernel.greedy()
        if chosen is not None and not torch.equal(chosen[: len(slots)], logits[: len(slots)].argmax(-1)):
            wanted = "each row's lowest token of the greatest logit"
            reasons.append(Reason(Code.NUMERICS, f"step {step.shape} greedy()", str(chosen.tolist()), wanted))
        written = self._written(slots)
        self._restore(slots, torch.stack([pool[self._index(slots)] for pool in before]))
        after = [pool[self._watched_W] for pool in self._pools()]
        touched = sum(_changed(a, b) for a, b in zip(before, after, strict=True))
        for pool, clean in zip(self._pools(), before, strict=True):
            pool.index_copy_(0, self._watched_W, clean)
        if touched:
            wanted = "only the rows' own slots are written"
            reasons.append(Reason(Code.KV_WRITE, f"step {step.shape}", f"{touched} other KV elements changed", wanted))
        return logits, written

    def _forward(self, kernel: Kernel, step: StepInputs) -> Tensor:
        import torch

        if torch.device(self.host.device).index is not None:
            torch.cuda.set_device(self.host.device)  # this is another thread than the host's
        with torch.inference_mode():
            logits = kernel.forward(step)
            self.host.synchronize()
        fault = kernel.fault()
        if fault is not None:
            raise fault
        return logits

    def _written(self, slots_R: Tensor) -> Tensor:
        import torch

        slots = slots_R[slots_R >= 0]
        return torch.stack([pool[slots] for pool in self._pools()])

    def _restore(self, slots_R: Tensor, values_LRE: Tensor) -> None:
        for pool, values in zip(self._pools(), values_LRE, strict=True):
            pool.index_copy_(0, slots_R[slots_R >= 0], values)

    def _index(self, slots: Tensor) -> Tensor:
        """Where slots are in the list of watched slots."""
        import torch

        order = torch.argsort(self._watched_W)
        return order[torch.searchsorted(self._watched_W[order], slots)]


def _changed(before: Tensor, after: Tensor) -> int:
    """Elements whose bits differ; NaN equals itself here."""
    import torch

    words = torch.int32 if before.element_size() == 4 else torch.int16
    if before.element_size() in (2, 4) and torch.equal(before.view(words), after.view(words)):
        return 0
    return int(measure("kv", STRICT, before, after).measured)


def _noise(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    import torch

    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(3).to(device=like.device, dtype=like.dtype)


def _found(measurement: Measurement) -> str:
    return f"{measurement.metric} {measurement.measured:.6g}"


def _wanted(measurement: Measurement) -> str:
    relation = "at least" if measurement.metric == Metric.COSINE.value else "at most"
    return f"{relation} {measurement.limit:g}"
