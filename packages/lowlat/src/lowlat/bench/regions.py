"""`lowlat bench regions`: where the time of a step goes, by named regions of the real step.

The step is measured with and without marks in alternation. Where the regions' sum is not within 3 % of the step without
marks, the marks disturbed it and the report refuses. On a GPU the marks are events inside the captured graph.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from lowlat.bench.arms.base import StepCase
from lowlat.bench.region_recorder import OTHER, RegionRecorder, Span
from lowlat.bench.results import Row, row_from_samples

SUM_TOLERANCE = 0.03
TIMELINE_STEPS = 10


class RegionsRefusedError(RuntimeError):
    """The regions do not add up to the step that users get, so their figures would mislead."""


class RegionArm(Protocol):
    """A step that can be run bare or with marks."""

    note: str

    def bare(self) -> float:
        """Microseconds of one step without marks."""

    def marked(self) -> list[Span]:
        """One step with marks."""

    def close(self) -> None:
        """Free what it holds."""


class RegionTimes(msgspec.Struct):
    """What was measured of one arm, in microseconds."""

    arm: str
    bare_us: list[float]
    steps: list[list[Span]]

    def instances(self) -> dict[str, list[Span]]:
        """All instances of each region, the whole step (`other` at depth 0) included, in the order first seen."""
        found: dict[str, list[Span]] = {}
        for spans in self.steps:
            for span in sorted(spans, key=lambda s: (s.start_us, s.depth)):
                found.setdefault(span.name, []).append(span)
        return found

    def own_us(self) -> dict[str, float]:
        """Median over the steps of what each region takes in a whole step, without the regions inside it."""
        totals: dict[str, list[float]] = {}
        for index, spans in enumerate(self.steps):
            for span in spans:
                series = totals.setdefault(span.name, [0.0] * len(self.steps))
                series[index] += span.own_us
        return {name: statistics.median(series) for name, series in totals.items()}

    @property
    def error(self) -> float:
        """Relative difference of the regions' sum from the step without marks."""
        return sum(self.own_us().values()) / statistics.median(self.bare_us) - 1.0


class TorchRegionArm:
    """The plain PyTorch step; on a GPU one graph without marks and one with."""

    def __init__(self, case: StepCase) -> None:
        import torch

        from lowlat.bench.arms.torch_step import TorchStep, capture, time_cpu, time_cuda

        self.note = "" if case.device == "cuda" else "no CUDA graph on a CPU"
        self._torch = torch
        self._recorder = RegionRecorder(case.device)
        self._time = time_cuda if case.device == "cuda" else time_cpu
        with torch.inference_mode():
            step = TorchStep(case, self._recorder)

            def with_marks() -> torch.Tensor:
                self._recorder.begin_step()
                out = step()
                self._recorder.end_step()
                return out

            self._recorder.enabled = False
            step()
            self._bare: Callable[[], object] = capture(step).replay if case.device == "cuda" else step
            self._recorder.enabled = True
            self._marked: Callable[[], object] = capture(with_marks).replay if case.device == "cuda" else with_marks

    def bare(self) -> float:
        """Microseconds of one step without marks."""
        self._recorder.enabled = False
        with self._torch.inference_mode():
            return self._time(self._bare, 1)[0]

    def marked(self) -> list[Span]:
        """One step with marks."""
        self._recorder.enabled = True
        with self._torch.inference_mode():
            self._marked()
        return self._recorder.spans()

    def close(self) -> None:
        """Drop weights and graphs."""
        del self._bare, self._marked


LAYER_PARTS = {"qkv": "qkv", "output": "attention output"}
MLP_PARTS = {"gate_up": "gate and up", "down": "down"}
"""Projections of a layer of lowlat's decoders and of its MLP, and what their regions are called."""


class GeneralRegionArm:
    """lowlat's own model runner; marks are put around the layers, projections, attention, head and sampling of it."""

    def __init__(self, case: StepCase) -> None:
        from lowlat.bench.arms.general import GeneralArm
        from lowlat.bench.arms.torch_step import time_cpu

        if case.device != "cpu":
            raise ValueError("regions of the general arm are marked on a CPU only in this version")
        self._arm = GeneralArm(case)
        self.note = self._arm.note
        self._time = time_cpu
        self._case = case
        self._left = 0
        self._recorder = RegionRecorder(case.device)

    def _mark(self) -> None:
        """Wrap what the runner calls. Undone after every step, so the bare step runs untouched code."""
        import lowlat.engine.runner as runner_module

        model: Any = self._arm.runner.model
        family: Any = __import__(type(model).__module__, fromlist=["paged_attention"])
        wrap = self._recorder.wrap
        for layer in model.layers:
            wrap(layer, "forward", "layer")
            for owner, parts in ((layer, LAYER_PARTS), (layer.mlp, MLP_PARTS)):
                for attribute, name in parts.items():
                    if hasattr(owner, attribute):
                        wrap(owner, attribute, name)
            wrap(layer, "mlp", "mlp")
        if hasattr(family, "paged_attention"):
            wrap(family, "paged_attention", "attention")
        wrap(model, "head", "head")
        wrap(runner_module, "sample_bursts", "sample")

    def _rewind_if_needed(self) -> None:
        """Keep the context within what its pages hold."""
        if self._left == 0:
            self._arm.rewind()
            self._left = self._case.steps
        self._left -= 1

    def bare(self) -> float:
        """Microseconds of one step without marks."""
        self._rewind_if_needed()
        return self._time(self._arm.decode, 1)[0]

    def marked(self) -> list[Span]:
        """One step with marks."""
        self._rewind_if_needed()
        self._mark()
        try:
            self._recorder.begin_step()
            self._arm.decode()
            self._recorder.end_step()
        finally:
            self._recorder.unwrap()
        return self._recorder.spans()

    def close(self) -> None:
        """Drop the model."""
        self._arm.close()


REGION_ARMS: dict[str, Callable[[StepCase], RegionArm]] = {
    "general": GeneralRegionArm,
    "torch-eager-graph": TorchRegionArm,
}


def measure_regions(
    name: str, arm: RegionArm, instances: int, say: Callable[[str], None] = lambda _: None
) -> RegionTimes:
    """Alternate bare and marked steps until every region has `instances` instances (at most so many steps)."""
    found = RegionTimes(name, [], [])
    for _ in range(2):
        arm.bare()
        arm.marked()
    for index in range(instances):
        # A B B A, so that neither kind always runs on the other's caches
        if index % 2 == 0:
            found.bare_us.append(arm.bare())
            found.steps.append(arm.marked())
        else:
            found.steps.append(arm.marked())
            found.bare_us.append(arm.bare())
        if (index + 1) % max(1, instances // 20) == 0:
            say(f"{name}: step {index + 1}")
    return found


def check_sum(times: RegionTimes) -> None:
    """Raise RegionsRefusedError where the regions' sum is more than 3 % from the step without marks."""
    if abs(times.error) > SUM_TOLERANCE:
        bare = statistics.median(times.bare_us)
        raise RegionsRefusedError(
            f"{times.arm}: the regions sum to {times.error:+.1%} of the step without marks ({bare:.1f} us); more than "
            f"{SUM_TOLERANCE:.0%} means that the marks or a busy machine disturbed it. Use larger regions (more rows), "
            "or a quieter machine"
        )


def region_rows(times: RegionTimes, case: StepCase, note: str) -> list[Row]:
    """A row for each region, medians over its instances; `own_us` in a step and the number of instances in details."""
    own = times.own_us()
    count = len(times.steps)
    bare = statistics.median(times.bare_us)
    rows = []
    for name, spans in times.instances().items():
        title = "step" if name == OTHER else name
        row = row_from_samples(
            [span.end_us - span.start_us for span in spans], workload=case.shape.name, arm=times.arm,
            metric="region_us", rows=case.requests, context=case.context, dtype=case.dtype, instances=len(spans),
            note=note,
        )  # fmt: skip
        row.details = {
            "region": title,
            "per_step": round(len(spans) / count, 3),
            "own_us_in_step": round(own[name], 3),
            "share_of_step": round(own[name] / sum(own.values()), 4),
            "step_without_marks_us": round(bare, 3),
            "sum_error": round(times.error, 5),
        }
        rows.append(row)
    return rows


def perfetto(all_times: list[RegionTimes]) -> str:
    """A trace that ui.perfetto.dev opens: one process for each arm, the first steps of each side by side in time."""
    events: list[dict[str, Any]] = []
    for process, times in enumerate(all_times, 1):
        events.append({"name": "process_name", "ph": "M", "pid": process, "tid": 1, "args": {"name": times.arm}})
        at = 0.0
        for index, spans in enumerate(times.steps[:TIMELINE_STEPS]):
            whole = max(span.end_us for span in spans)
            for span in sorted(spans, key=lambda s: (s.start_us, s.depth)):
                name = f"step {index}" if span.depth == 0 else span.name
                event = {"name": name, "ph": "X", "pid": process, "tid": 1, "ts": at + span.start_us}
                events.append({**event, "dur": span.end_us - span.start_us, "args": {"own_us": span.own_us}})
            at += whole + max(1.0, 0.02 * whole)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def timeline(all_times: list[RegionTimes], path: pathlib.Path) -> list[pathlib.Path]:
    """A picture (PNG and SVG) of the step of median length of each arm, regions by colour, nesting downwards."""
    from lowlat.bench.plots import bars

    tracks: dict[str, list[tuple[str, float, float, int]]] = {}
    for times in all_times:
        lengths = [max(span.end_us for span in spans) for spans in times.steps]
        typical = times.steps[lengths.index(statistics.median_low(lengths))]
        tracks[times.arm] = [(s.name, s.start_us, s.end_us - s.start_us, s.depth - 1) for s in typical if s.depth > 0]
    return bars(tracks, path, "Regions of the step of median length")
