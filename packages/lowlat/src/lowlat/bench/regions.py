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
from lowlat.bench.busy import BUSY_SHARE, CpuShare, busy_note, load_average
from lowlat.bench.region_recorder import OTHER, Span
from lowlat.bench.results import Result, Row, row_from_samples
from lowlat.bench.stats import median_interval

SUM_TOLERANCE = 0.03
ATTEMPTS = 3
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
    cpu_share: float | None = None
    """Of the time of a CPU's measurement, how much this process really ran."""
    attempts: int = 1

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

    @property
    def marked_error(self) -> float:
        """The same of the steps with marks as wholes: what the marks cost, however the regions vary between steps."""
        wholes = [sum(span.own_us for span in spans) for spans in self.steps]
        return statistics.median(wholes) / statistics.median(self.bare_us) - 1.0

    @property
    def moved(self) -> float:
        """By how much the median of the step without marks differs between the quarters of the run."""
        size = -(-len(self.bare_us) // 4)
        quarters = [self.bare_us[at : at + size] for at in range(0, len(self.bare_us), size)]
        medians = [statistics.median(quarter) for quarter in quarters]
        return max(medians) / min(medians) - 1.0


def measure_regions(
    name: str,
    arm: RegionArm,
    instances: int,
    say: Callable[[str], None] = lambda _: None,
    *,
    threads: int | None = None,
    begun: Callable[[RegionTimes], None] = lambda growing: None,
) -> RegionTimes:
    """Alternate bare and marked steps until every region has `instances` instances (at most so many steps).

    `threads` of a CPU compute the step. `begun` is told the times that grow from then on.
    """
    found = RegionTimes(name, [], [])
    for _ in range(2):
        arm.bare()
        arm.marked()
    begun(found)
    share = CpuShare()
    turns = -(-instances // arm.batch)
    for index in range(turns):
        # A B B A, so that neither kind always runs on the other's caches
        if index % 2 == 0:
            bare, marked = share(arm.bare), share(arm.marked)
        else:
            marked, bare = share(arm.marked), share(arm.bare)
        found.bare_us += bare
        found.steps += marked
        if threads is not None:
            found.cpu_share = share.of(threads)
        if (index + 1) % max(1, turns // 20) == 0:
            say(f"{name}: step {(index + 1) * arm.batch}")
    return found


def measure_settled(
    name: str,
    arm: RegionArm,
    instances: int,
    say: Callable[[str], None] = lambda _: None,
    *,
    threads: int | None = None,
    begun: Callable[[RegionTimes], None] = lambda growing: None,
) -> RegionTimes:
    """As `measure_regions`, and again where the sum was off because something else disturbed the steps: the first of
    three attempts whose regions add up counts.

    Raises RegionsRefusedError with cause and cure where none does.
    """
    for attempt in range(1, ATTEMPTS + 1):
        times = measure_regions(name, arm, instances, say, threads=threads, begun=begun)
        times.attempts = attempt
        try:
            check_sum(times, arm.details)
        except RegionsRefusedError as error:
            if attempt == ATTEMPTS or not disturbances(times):
                raise
            say(f"{error}. Measuring again, {attempt + 1} of {ATTEMPTS}")
        else:
            break
    return times


def disturbances(times: RegionTimes) -> list[str]:
    """What shows that other work disturbed the steps, and not the marks."""
    found = []
    if times.moved > SUM_TOLERANCE:
        found.append(f"the step without marks itself moved by {times.moved:.1%} between quarters of the run")
    if times.cpu_share is not None and times.cpu_share < BUSY_SHARE:
        found.append(f"this process ran {times.cpu_share:.0%} of the time")
    known = median_interval(times.bare_us)
    if known.low <= sum(times.own_us().values()) <= known.high:
        found.append(
            f"the sum lies inside the interval of the {known.samples} steps without marks ({known.low:.1f} to "
            f"{known.high:.1f} us; more --instances narrow it)"
        )
    if abs(times.marked_error) <= SUM_TOLERANCE < abs(times.error):
        found.append(f"steps with marks took {times.marked_error:+.1%} as wholes, but their parts vary between steps")
    return found


def check_sum(times: RegionTimes, details: Mapping[str, float] | None = None) -> None:
    """Raise RegionsRefusedError with cause and cure where the regions' sum is more than 3 % from the step without
    marks, or where a kernel library's step was as much longer with its own time stamps."""
    if abs(times.error) > SUM_TOLERANCE:
        raise RegionsRefusedError(_refusal(times))
    stretch = (details or {}).get("parts_over_region", 1.0) - 1.0
    if abs(stretch) > SUM_TOLERANCE:
        raise RegionsRefusedError(
            f"{times.arm}: with time stamps inside the kernels took {stretch:+.1%}; more than {SUM_TOLERANCE:.0%} "
            "means that the stamps disturbed them"
        )


def _refusal(times: RegionTimes) -> str:
    found = disturbances(times)
    tried = f", {times.attempts} times measured" if times.attempts > 1 else ""
    text = (
        f"{times.arm}: the regions sum to {times.error:+.1%} of the step without marks "
        f"({statistics.median(times.bare_us):.1f} us{tried}), and more than {SUM_TOLERANCE:.0%} is refused: "
    )
    if not found:
        return text + "nothing else moved, so the marks did it. Use larger regions: more --rows, a larger --model"
    load, cores = load_average()
    text += (
        f"{'; '.join(found)} (load average {load:.1f} on {cores} cores). Other work on this machine does that: end it "
        "or wait for it, or leave it cores (--threads 1), and run this again"
    )
    if abs(times.marked_error) > SUM_TOLERANCE:
        text += ". Where a quiet machine refuses too, it is the marks: use larger regions (--rows, a larger --model)"
    return text


def region_rows(times: RegionTimes, case: StepCase, note: str, details: Mapping[str, float] | None = None) -> list[Row]:
    """A row for each region, medians over its instances; `own_us` in a step and the number of instances in details."""
    own = times.own_us()
    count = len(times.steps)
    bare = statistics.median(times.bare_us)
    note += busy_note(times.cpu_share) if times.cpu_share is not None else ""
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
            **({"attempts": times.attempts} if times.attempts > 1 else {}),
            **({"cpu_share": round(times.cpu_share, 3)} if times.cpu_share is not None else {}),
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


def timeline(all_times: list[RegionTimes], path: pathlib.Path, result: Result) -> list[pathlib.Path]:
    """A picture (PNG and SVG) of the step of median length of each arm, regions by colour, nesting downwards.

    `result` tells the machine, and what was simulated.
    """
    from lowlat.bench.plots import bars, caption

    tracks: dict[str, list[tuple[str, float, float, int]]] = {}
    for times in all_times:
        lengths = [max(span.end_us for span in spans) for spans in times.steps]
        typical = times.steps[lengths.index(statistics.median_low(lengths))]
        tracks[times.arm] = [(s.name, s.start_us, s.end_us - s.start_us, s.depth - 1) for s in typical if s.depth > 0]
    names = ", ".join(dict.fromkeys(row.workload for row in result.rows))
    return bars(tracks, path, f"Regions of the step of median length: {names}\n{caption(result)}")
