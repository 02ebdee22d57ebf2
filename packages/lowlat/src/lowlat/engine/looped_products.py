"""Which products of several rows the looped kernel computes: measured at the start, with this model's weights.

Legend of shape suffixes: R rows, I input features.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from lowlat.layers.device_step import DeviceOps
from lowlat.layers.triton.ahead import compile_all, rehearsal
from lowlat.layers.triton.looped_product import SHAPES, LoopShape, fits
from lowlat.layers.triton_ops import RowProduct, TritonOps
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.platform.cuda import CudaLinear

log = logging.getLogger("lowlat.engine")

_REPEATS = 5
# Weights that are multiplied in turn: more than a cache holds.
_BYTES = 300 << 20
# Of the largest entry, in bfloat16: both round what they multiply and what they return.
_TOLERANCE = 0.03


class Case:
    """Products of one kind: each layer's, or some of them, all of the same rows, so that roundings do not add up."""

    def __init__(self, key: RowProduct, rows: int, linears: list[CudaLinear], norm_I: torch.Tensor | None) -> None:
        self.key, self.rows, self.linears = key, rows, linears
        self._norm_I = norm_I
        weight_OI = linears[0].weight_OI
        generator = torch.Generator(weight_OI.device).manual_seed(0)
        shape = (2, rows, key.width)
        drawn_2RI = torch.randn(shape, generator=generator, device=weight_OI.device).to(weight_OI.dtype)
        self._x_RI, self._stream_RI = drawn_2RI.unbind()

    def first(self, ops: TritonOps) -> torch.Tensor:
        """The first layer's result, float32."""
        return self._run(ops, self.linears[0], self._stream_RI.clone()).float()

    def run(self, ops: TritonOps) -> None:
        """All of them; a norm that stands alone adds to its stream, which others do not need."""
        stream_RI = self._stream_RI.clone()
        for linear in self.linears:
            self._run(ops, linear, stream_RI)

    def _run(self, ops: TritonOps, linear: CudaLinear, stream_RI: torch.Tensor) -> torch.Tensor:
        if self._norm_I is None:
            return ops.product(self._x_RI, linear, self.key.activation)
        return ops.add_norm_product(self._x_RI, stream_RI, self._norm_I, 1e-6, linear, self.key.activation)[0]


@torch.inference_mode()
def choose_looped_products(model: DeviceDecoder, ops: DeviceOps, most_rows: int) -> None:
    """Let `ops` use the looped kernel for steps of up to `most_rows` rows where it is right, and faster than what `ops`
    uses by then, with the kernels that stand around it."""
    assert isinstance(ops, TritonOps)
    started = time.monotonic()
    try:
        found = cases(model, [rows for rows in (4, 8) if rows == 4 or most_rows > 4])
        _compile(found, ops, model.decoder.embedding_VH.device)
        for case in found:
            _choose(case, ops)
    except Exception as error:  # whatever a compiler or a driver says: the others are always there
        ops.loop_shapes.clear()
        log.warning("the looped kernel is not used: %s", error)
        return
    ours, seconds = len(ops.loop_shapes), time.monotonic() - started
    log.info(
        "products of several rows: %d of %d kinds by the looped kernel, measured in %.1f s", ours, len(found), seconds
    )


def cases(model: DeviceDecoder, rows: Iterable[int]) -> list[Case]:
    """The kinds of products of a model, for each of these numbers of rows."""
    kinds: dict[RowProduct, list[tuple[CudaLinear, torch.Tensor | None]]] = defaultdict(list)
    numbers = {}
    for linear, norm_I, activation in model.products():
        for count in rows:
            if isinstance(linear, CudaLinear) and fits(count, linear.weight_OI):
                key = RowProduct.of(count, linear, activation, normed=norm_I is not None)
                kinds[key].append((linear, norm_I))
                numbers[key] = count
    found = []
    for key, many in kinds.items():
        size = many[0][0].weight_OI.numel() * many[0][0].weight_OI.element_size()
        linears = [linear for linear, _ in many[: max(1, -(-_BYTES // size))]]
        found.append(Case(key, numbers[key], linears, many[0][1]))
    return found


def _compile(found: list[Case], ops: TritonOps, device: torch.device) -> None:
    with rehearsal() as compilations:
        for case in found:
            for shape in (None, *SHAPES):
                _use(ops, case.key, shape)
                case.first(ops)
    ops.loop_shapes.clear()
    compile_all(compilations, device)


def _use(ops: TritonOps, key: RowProduct, shape: LoopShape | None) -> None:
    ops.loop_shapes.pop(key, None)
    if shape is not None:
        ops.loop_shapes[key] = shape


def _choose(case: Case, ops: TritonOps) -> None:
    """The fastest of those that give what the others do."""
    _use(ops, case.key, None)
    expected, fastest = case.first(ops), _seconds(lambda: case.run(ops))
    chosen, told = None, [f"else {fastest * 1e6 / len(case.linears):.2f} us"]
    for shape in SHAPES:
        _use(ops, case.key, shape)
        right = bool((case.first(ops) - expected).abs().max() <= _TOLERANCE * expected.abs().max())
        seconds = _seconds(lambda: case.run(ops))
        told.append(
            f"{shape.block_n} x {shape.block_k} in {shape.stages} stages {seconds * 1e6 / len(case.linears):.2f} us"
        )
        if not right:
            told[-1] += " and wrong"
        elif seconds < fastest:
            chosen, fastest = shape, seconds
    _use(ops, case.key, chosen)
    key = case.key
    kind = ", ".join(
        [f"{key.outputs} x {key.width}", *(["normed"] * key.normed), *([key.activation] if key.activation else [])]
    )
    log.info("%d rows by %s: %s", case.rows, kind, "; ".join(told))


def _seconds(run: Callable[[], None]) -> float:
    """Of a replay: the best of a few."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    best = math.inf
    for _ in range(_REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) / 1e3)
    return best
