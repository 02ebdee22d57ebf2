"""`lowlat bench regions`: where the time of a step goes, by named regions of the real step.

The step is measured with and without marks in alternation. Where the regions' sum is not within 3 % of the step without
marks, the marks disturbed it and the report refuses.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from lowlat.bench.arms.base import StepCase
from lowlat.bench.region_recorder import OTHER, Span
from lowlat.bench.results import Row, row_from_samples

SUM_TOLERANCE = 0.03
TIMELINE_STEPS = 10


class RegionsRefusedError(RuntimeError):
    """The regions do not add up to the step that users get, so their figures would mislead."""


class RegionArm(Protocol):
    """A step that can be run bare or with its regions' times taken."""

    note: str
    batch: int
    """Steps that are run together."""

    @property
    def details(self) -> dict[str, float]:
        """Further figures of how times were taken."""

    def bare(self) -> list[float]:
        """Microseconds of each of `batch` steps as users get them."""

    def marked(self) -> list[list[Span]]:
        """The regions of `batch` steps."""

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


def measure_regions(
    name: str, arm: RegionArm, instances: int, say: Callable[[str], None] = lambda _: None
) -> RegionTimes:
    """Alternate bare and marked steps until every region has `instances` instances (at most so many steps)."""
    found = RegionTimes(name, [], [])
    for _ in range(2):
        arm.bare()
        arm.marked()
    turns = -(-instances // arm.batch)
    for index in range(turns):
        # A B B A, so that neither kind always runs on the other's caches
        if index % 2 == 0:
            found.bare_us += arm.bare()
            found.steps += arm.marked()
        else:
            found.steps += arm.marked()
            found.bare_us += arm.bare()
        if (index + 1) % max(1, turns // 20) == 0:
            say(f"{name}: step {(index + 1) * arm.batch}")
    return found


def check_sum(times: RegionTimes, details: Mapping[str, float] | None = None) -> None:
    """Raise RegionsRefusedError where the regions' sum is more than 3 % from the step without marks, or where a kernel
    library's step was as much longer with its own time stamps."""
    if abs(times.error) > SUM_TOLERANCE:
        bare = statistics.median(times.bare_us)
        raise RegionsRefusedError(
            f"{times.arm}: the regions sum to {times.error:+.1%} of the step without marks ({bare:.1f} us); more than "
            f"{SUM_TOLERANCE:.0%} means that the marks or a busy machine disturbed it. Use larger regions (more rows), "
            "or a quieter machine"
        )
    stretch = (details or {}).get("parts_over_region", 1.0) - 1.0
    if abs(stretch) > SUM_TOLERANCE:
        raise RegionsRefusedError(
            f"{times.arm}: with time stamps inside the kernels took {stretch:+.1%}; more than {SUM_TOLERANCE:.0%} "
            "means that the stamps disturbed them"
        )


def region_rows(times: RegionTimes, case: StepCase, note: str, details: Mapping[str, float] | None = None) -> list[Row]:
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
            **(details or {}),
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
