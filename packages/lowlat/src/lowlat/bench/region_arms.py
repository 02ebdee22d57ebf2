"""The arms of `lowlat bench regions`: steps with clocks in them on a CPU, replays of a graph on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from lowlat.bench.arms.base import ArmUnavailableError, StepCase, check_library_arm, kernel_library
from lowlat.bench.region_recorder import Marks, RegionRecorder, Span
from lowlat.bench.regions import RegionArm
from lowlat.layers.moe import MixtureOfExperts
from lowlat.models.decoder import Decoder
from lowlat_plugin import Part, StepInputs

LAYER_PARTS = {"qkv": "qkv", "output": "attention output"}
MLP_PARTS = {"gate_up": "gate and up", "down": "down"}
"""Projections of a layer of lowlat's decoders and of its MLP, and what their regions are called."""
OPERATIONS = {
    "attend": "attention", "row_attend": "attention", "rope_write": "rotation and cache write", "norm": "norm",
    "add_norm": "norm", "gate": "activation", "take_slots": "states", "put_tokens": "states", "begin_rows": "states",
    "accept": "acceptance", "experts": "experts",
}  # fmt: skip
"""What lies between the projections where state is on the device."""

KERNELS = "kernels"
"""The region of a kernel library's step."""

GRAPH_STEPS = 65
"""Replays in one measurement."""


def check_region_arm(name: str) -> None:
    """Raise ValueError for a name whose regions nothing tells."""
    library = kernel_library(name)
    if name not in ("general", "torch-eager-graph") and library is None:
        raise ValueError(f"{name!r} has no regions; known: general, torch-eager-graph, lowlat-NAME, plugin:NAME")
    if library is not None:
        check_library_arm(name, library)


def build_region_arm(name: str, case: StepCase) -> RegionArm:
    """`general`, `torch-eager-graph`, or a kernel library as `lowlat-NAME` or `plugin:NAME`.

    Raises ArmUnavailableError where its regions cannot be told here, and ValueError for a name that is no arm.
    """
    check_region_arm(name)
    if name == "torch-eager-graph":
        if case.model is not None or case.spec != "off":
            raise ArmUnavailableError("the plain PyTorch step has random weights and no guesses")
        return ClockedTorchArm(case) if case.device == "cpu" else _torch_graph(case)
    library = kernel_library(name)
    return ClockedRunnerArm(case, library) if case.device == "cpu" else _runner_graph(case, library)


class ClockedTorchArm:
    """The plain PyTorch step on a CPU."""

    batch = 1
    note = "no CUDA graph on a CPU"

    def __init__(self, case: StepCase) -> None:
        from lowlat.bench.arms.torch_step import TorchStep, time_cpu

        self.details: dict[str, float] = {}
        self._recorder = RegionRecorder()
        self._time = time_cpu
        with torch.inference_mode():
            self._step = TorchStep(case, self._recorder)

    def bare(self) -> list[float]:
        """Microseconds of one step without marks."""
        self._recorder.enabled = False
        with torch.inference_mode():
            return self._time(self._step, 1)

    def marked(self) -> list[list[Span]]:
        """One step with marks."""
        self._recorder.enabled = True
        with torch.inference_mode():
            self._recorder.begin_step()
            self._step()
            self._recorder.end_step()
        return [self._recorder.spans()]

    def close(self) -> None:
        """Drop the weights."""
        del self._step


class ClockedRunnerArm:
    """lowlat's own model runner on a CPU, with a kernel library where one is named.

    Marks are put around layers, projections, attention, head and sampling, or around the library's step. They are
    undone after every step, so the bare step runs untouched code.
    """

    batch = 1

    def __init__(self, case: StepCase, kernels: str | None) -> None:
        from lowlat.bench.arms.general import GeneralArm
        from lowlat.bench.arms.torch_step import time_cpu

        self._arm = GeneralArm(case, kernels)
        self.note = self._arm.note
        self.details: dict[str, float] = {}
        self._time = time_cpu
        self._case = case
        self._kernels = kernels
        self._left = 0
        self._recorder = RegionRecorder()

    def _mark(self) -> None:
        import lowlat.engine.runner as runner_module

        runner: Any = self._arm.runner
        self._recorder.wrap(runner_module, "sample_bursts", "sample")
        if runner.speculation is not None:
            self._recorder.wrap(runner.speculation, "guess", "proposals")
        if self._kernels is not None:
            self._recorder.wrap(self._arm.low, "forward", KERNELS)
        elif isinstance(runner.model, Decoder):
            mark_decoder(self._recorder, runner.model)
        else:
            mark_deepseek(self._recorder, runner.model.model)

    def _rewind_if_needed(self) -> None:
        """Keep the context within what its pages hold."""
        if self._left == 0:
            self._arm.rewind()
            self._left = self._case.steps
        self._left -= 1

    def bare(self) -> list[float]:
        """Microseconds of one step without marks."""
        self._rewind_if_needed()
        return self._time(self._arm.decode, 1)

    def marked(self) -> list[list[Span]]:
        """One step with marks."""
        self._rewind_if_needed()
        self._mark()
        try:
            self._recorder.begin_step()
            self._arm.decode()
            self._recorder.end_step()
        finally:
            self._recorder.unwrap()
        return [self._recorder.spans()]

    def close(self) -> None:
        """Drop the model."""
        self._arm.close()


def _projections(layer: Any) -> list[tuple[Any, str, str]]:
    """Owner, attribute and region of a layer's products."""
    return [
        (owner, attribute, name)
        for owner, parts in ((layer, LAYER_PARTS), (layer.mlp, MLP_PARTS))
        for attribute, name in parts.items()
        if hasattr(owner, attribute)
    ]


def mark_decoder(marks: Marks, model: Any) -> None:
    """Mark the parts of a dense decoder's forward on the host."""
    family: Any = __import__(type(model).__module__, fromlist=["paged_attention"])
    for layer in model.layers:
        marks.wrap(layer, "forward", "layer")
        for owner, attribute, name in _projections(layer):
            marks.wrap(owner, attribute, name)
        marks.wrap(layer, "mlp", "experts" if isinstance(layer.mlp, MixtureOfExperts) else "mlp")
    marks.wrap(model, "head", "head")
    if hasattr(family, "paged_attention"):
        marks.wrap(family, "paged_attention", "attention")


def mark_deepseek(marks: Marks, model: Any) -> None:
    """Mark the parts of a DeepSeek model's forward; `experts` is router, routed and shared experts."""
    marks.wrap(model, "_layer", "layer")
    marks.wrap(model, "head_logits", "head")
    for layer in model.layers:
        marks.wrap(layer.attention, "forward", "attention")
        marks.wrap(layer.feed_forward, "forward", "experts")
        marks.wrap(layer.streams, "mix", "hyper-connections")
        if layer.engram is not None:
            marks.wrap(layer.engram, "update", "engram")


def mark_device_step(marks: Marks, runner: Any) -> None:
    """Mark the parts of a step whose state lives on the device (`DeviceRunner`). Norms, additions and activations that
    are computed with a product belong to it."""
    model = runner.model
    decoder = model.decoder
    marks.wrap(runner.choice, "take", "sample")
    if runner.verifier is not None:
        mark_checks(marks, runner.verifier)
    marks.wrap(model, "_layer", "layer")
    marks.wrap(model, "_mlp", "mlp")
    for attribute, name in OPERATIONS.items():
        if hasattr(model.ops, attribute):
            marks.wrap(model.ops, attribute, name)
    names = {id(decoder.head): "head"}
    for layer in decoder.layers:
        names |= {id(getattr(owner, attribute)): name for owner, attribute, name in _projections(layer)}
        if isinstance(layer.mlp, MixtureOfExperts):
            marks.wrap(layer.mlp, "router", "router")

    def weights_region(*arguments: Any, **keywords: Any) -> str:
        given = (id(argument) for argument in (*arguments, *keywords.values()))
        return next((names[identity] for identity in given if identity in names), "product")

    for attribute in ("product", "add_norm_product"):
        marks.wrap(model.ops, attribute, weights_region)


def mark_checks(marks: Marks, verifier: Any) -> None:
    """Mark what a device's step does to check guesses; `proposals` is all that a draft computes."""
    import lowlat.engine.device_verify as verify_module

    marks.wrap(verify_module, "choose", "sample")
    marks.wrap(verifier, "_guesses", "proposals", whole=True)
    draft = getattr(verifier.speculation.draft, "beside", None)
    if hasattr(draft, "extend"):  # keys and values of its own for the rows that the model computes
        marks.wrap(draft, "extend", "proposals", whole=True)


class GraphArm:
    """A captured step: bare replays are timed by events, marked ones by the records of their kernels.

    Where a kernel library tells the parts of its own launch, they are measured step by step beside that, and fitted
    into the library's region.
    """

    batch = GRAPH_STEPS

    def __init__(
        self,
        note: str,
        replay: Callable[[], object],
        body: Callable[[], object],
        mark: Callable[[Marks], None],
        rewind: Callable[[], None],
        close: Callable[[], None],
        parts: Callable[[], Sequence[Part]] | None = None,
    ) -> None:
        """`body` is what the graph holds, one by one; `mark` wraps its parts; `rewind` precedes every batch.

        `parts` runs the library's step of `body` once more, and tells its parts.
        """
        from lowlat.bench import kernel_regions

        self.note = note
        self._replay, self._rewind, self.close = replay, rewind, close
        self._kernel_regions = kernel_regions
        rewind()  # before there are marks: it may capture graphs, and marks wait for the device
        marks = kernel_regions.ProfilerMarks()
        mark(marks)
        try:
            with torch.inference_mode():
                self._layout = kernel_regions.layout_of(body, marks)
        finally:
            marks.unwrap()
            marks.enabled = False
        self._tracing_us = kernel_regions.tracing_cost()
        self._parts = parts
        self._stretches: list[float] = []

    @property
    def details(self) -> dict[str, float]:
        """Kernels of a step, the cost of recording one, and how much longer a library's parts were than its region."""
        found = {"kernels_per_step": len(self._layout.kernels), "tracing_us_per_kernel": round(self._tracing_us, 4)}
        if self._stretches:
            found["parts_over_region"] = round(statistics.median(self._stretches), 5)
        return found

    def bare(self) -> list[float]:
        """Microseconds of replays queued one behind another."""
        from lowlat.bench.arms.torch_step import time_cuda

        self._rewind()
        with torch.inference_mode():
            return time_cuda(self._replay, self.batch)

    def marked(self) -> list[list[Span]]:
        """Regions of as many replays."""
        tools, layout = self._kernel_regions, self._layout
        self._rewind()
        with torch.inference_mode():
            before, *records = tools.traced_replays(self._replay, self.batch, len(layout.kernels))
        found, free = [], before.end_us
        for step in tools.split_steps(records, layout, self.batch):
            found.append(tools.spans_of(step, layout, free, self._tracing_us))
            free = max(free, max(record.end_us for record in step))
        return found if self._parts is None else [self._with_parts(spans, self._parts()) for spans in found]

    def _with_parts(self, spans: list[Span], parts: Sequence[Part]) -> list[Span]:
        if not parts:
            return spans
        found, stretch = self._kernel_regions.with_parts(spans, KERNELS, parts)
        self._stretches.append(stretch)
        return found


def _torch_graph(case: StepCase) -> RegionArm:
    from lowlat.bench.arms.torch_step import TorchStep, capture

    with torch.inference_mode():
        step = TorchStep(case)
        replay = capture(step).replay

    def mark(marks: Marks) -> None:
        step.regions = marks

    return GraphArm("", replay, step, mark, lambda: None, torch.cuda.empty_cache)


def _runner_graph(case: StepCase, kernels: str | None) -> RegionArm:
    from lowlat.bench.arms.general import GeneralArm
    from lowlat.engine.device_runner import DeviceRunner

    arm = GeneralArm(msgspec.structs.replace(case, steps=GRAPH_STEPS + 4), kernels)
    runner, low = arm.runner, arm.low
    if not isinstance(runner, DeviceRunner) or not runner.bodies.captured:
        raise ArmUnavailableError(f"steps of {kernels or 'this model'} are not captured in a graph here")

    def rewind() -> None:
        arm.rewind()
        arm.decode()

    rewind()
    replay, body = runner.captured_step(list(range(case.requests)))
    seen: list[StepInputs] = []

    def mark(marks: Marks) -> None:
        mark_device_step(marks, runner)
        if kernels is None:
            return
        marks.wrap(low, "forward", KERNELS)
        forward = low.forward

        def noted(step: StepInputs) -> torch.Tensor:
            seen[:] = [step]
            return forward(step)

        low.forward = noted  # type: ignore[method-assign]

    def parts() -> Sequence[Part]:
        assert low.kernel is not None
        return low.kernel.parts(seen[0])

    return GraphArm(arm.note, replay, body, mark, rewind, arm.close, parts if kernels is not None else None)
