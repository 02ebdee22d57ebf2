"""Regions of a captured step on a GPU, from the records that CUPTI takes of its kernels.

Marks inside a graph would be nodes of it and change what they measure. Instead the step's operations run once, one by
one, under PyTorch's profiler with marks on the host: that tells which kernel belongs to which region. A replay of the
graph has the same kernels in the same order, and its records tell their times. The gap before a kernel belongs to
the kernel's region, so the regions of a step add up to the time from the end of the step before to its own end.

Taking records costs time between kernels. The cost is measured in the same run, on a chain of kernels that do nothing,
and taken out of the gaps; whether that was right is judged by the sum of the regions, as always.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch._C._autograd import DeviceType

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.region_recorder import OTHER, Marks, Span
from lowlat_plugin import Part

PREFIX = "region: "
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CHAIN = 256


class RecordsError(RuntimeError):
    """The records do not show the step that was captured."""


class KernelRecord(msgspec.Struct, frozen=True):
    """One kernel, copy or fill on the GPU, in microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


class Layout(msgspec.Struct, frozen=True):
    """A step's kernels in order, and for each the instances of regions that it lies in, outermost first."""

    kernels: list[str]
    paths: list[tuple[int, ...]]
    regions: list[str]
    """Names of instances."""


class ProfilerMarks(Marks):
    """Marks are ranges of PyTorch's profiler; the GPU is idle at each, so that no launch is attributed wrongly."""

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark what runs inside as region `name`; regions nest."""
        if not self.enabled:
            yield
            return
        torch.cuda.synchronize()
        with torch.profiler.record_function(PREFIX + name):
            yield
            torch.cuda.synchronize()


def read_layout(trace: dict[str, Any]) -> Layout:
    """The layout of a step that ran once under the profiler inside the region `other`; `trace` is its Chrome trace.

    A kernel lies in the regions that were open when the host launched it. Raises RecordsError where there is none.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = sorted(
        (float(event["ts"]), -float(event["dur"]), event["name"].removeprefix(PREFIX))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX)
    )
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    kernels, paths = [], []
    for event in sorted((e for e in events if e.get("cat") in _WORK), key=lambda e: float(e["ts"])):
        at = launched.get(event.get("args", {}).get("correlation"), float(event["ts"]))
        path = tuple(index for index, (start, size, _) in enumerate(ranges) if start <= at <= start - size)
        if path:
            kernels.append(event["name"])
            paths.append(path)
    if not kernels:
        raise RecordsError("the profiler saw no kernel of the step: CUPTI is missing, or another tool holds it")
    return Layout(kernels, paths, [name for _, _, name in ranges])


def split_steps(records: list[KernelRecord], layout: Layout, steps: int) -> list[list[KernelRecord]]:
    """The records of `steps` replays, one list each. Raises RecordsError where kernels differ from the layout's."""
    size = len(layout.kernels)
    if len(records) != steps * size:
        raise RecordsError(f"{steps} replays of {size} kernels left {len(records)} records")
    found = [records[index : index + size] for index in range(0, len(records), size)]
    for step in found:
        for place, (record, name) in enumerate(zip(step, layout.kernels, strict=True)):
            if record.name != name:
                raise RecordsError(f"kernel {place} of a replay is {record.name}, and {name} where it ran alone")
    return found


def spans_of(step: list[KernelRecord], layout: Layout, before_us: float, tracing_us: float = 0.0) -> list[Span]:
    """All regions of one replay, each after those inside it; the step itself comes last as `other` at depth 0.

    `before_us` is when the replay before ended. `tracing_us` is what taking one record costs; it is taken out of the
    gap before a kernel, as far as there is one.
    """
    count = len(layout.regions)
    starts, ends, own = [-1.0] * count, [0.0] * count, [0.0] * count
    at, free = 0.0, before_us
    for record, path in zip(step, layout.paths, strict=True):
        end = max(free, record.end_us)
        busy = end - max(free, record.start_us)
        size = busy + max(0.0, max(0.0, record.start_us - free) - tracing_us)
        for instance in path:
            if starts[instance] < 0:
                starts[instance] = at
            ends[instance] = at + size
        own[path[-1]] += size
        at, free = at + size, end
    depths = {instance: depth for path in layout.paths for depth, instance in enumerate(path)}
    found = [
        Span(layout.regions[i], starts[i], ends[i], depths[i], own[i]) for i in sorted(depths, key=lambda i: -depths[i])
    ]
    return sorted(found, key=lambda span: (span.end_us, -span.depth))


def with_parts(spans: list[Span], name: str, parts: Sequence[Part]) -> tuple[list[Span], float]:
    """The spans with a kernel library's own parts inside region `name`, fitted to its length; and how much longer than
    the region the parts were.
    """
    outer = next(span for span in spans if span.name == name)
    size, length = outer.end_us - outer.start_us, max(part.end_us for part in parts)
    ordered = sorted(parts, key=lambda part: (part.start_us, part.depth))
    own = [(part.end_us - part.start_us) * size / length for part in ordered]
    top = size
    open_parts: list[int] = []
    for index, part in enumerate(ordered):
        while open_parts and ordered[open_parts[-1]].depth >= part.depth:
            open_parts.pop()
        long = (part.end_us - part.start_us) * size / length
        if open_parts:
            own[open_parts[-1]] -= long
        else:
            top -= long
        open_parts.append(index)
    found = [
        Span(
            part.name, outer.start_us + part.start_us * size / length, outer.start_us + part.end_us * size / length,
            outer.depth + part.depth, alone,
        )
        for part, alone in zip(ordered, own, strict=True)
    ]  # fmt: skip
    rest = [msgspec.structs.replace(span, own_us=top) if span is outer else span for span in spans]
    return sorted([*rest, *found], key=lambda span: (span.end_us, -span.depth)), length / size


@contextlib.contextmanager
def _profiled(*, host: bool) -> Iterator[Any]:
    with torch.autograd.profiler.profile(use_device="cuda", use_kineto=True, use_cpu=host) as profile:
        yield profile
        torch.cuda.synchronize()


def _gpu_records(profile: Any) -> list[KernelRecord]:
    """Work on the GPU in order of its start, in microseconds from the first."""
    cuda = DeviceType.CUDA
    events = [event for event in profile.kineto_results.events() if event.device_type() == cuda and _is_work(event)]
    events.sort(key=lambda event: event.start_ns())
    # Nanoseconds since 1970 do not fit into a float.
    first = events[0].start_ns() if events else 0
    starts = [event.start_ns() - first for event in events]
    return [
        KernelRecord(event.name(), start / 1e3, (start + event.duration_ns()) / 1e3)
        for event, start in zip(events, starts, strict=True)
    ]


def _is_work(event: Any) -> bool:
    """Whether an event is work: annotations and waits stand beside it. Events say what they are since PyTorch 2.12."""
    if hasattr(event, "activity_type"):
        return event.activity_type() in _WORK
    return not (event.name().startswith(PREFIX) or event.name().endswith(" Sync"))


def layout_of(body: Callable[[], object], marks: ProfilerMarks) -> Layout:
    """Run the operations of a step once, with marks, and tell which kernel is whose."""
    body()
    with _profiled(host=True) as profile, marks.region(OTHER):
        body()
    with tempfile.TemporaryDirectory(prefix="lowlat-bench-") as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.kineto_results.save(str(path))
        layout = read_layout(json.loads(path.read_text(errors="replace")))
    names = [record.name for record in _gpu_records(profile)]
    if len(names) != len(layout.kernels):
        raise RecordsError(f"{len(names)} kernels were recorded, and {len(layout.kernels)} of them inside the step")
    return msgspec.structs.replace(layout, kernels=names)


def traced_replays(replay: Callable[[], object], steps: int, kernels: int) -> list[KernelRecord]:
    """Records of `steps` replays behind one more, whose last record comes first."""
    with _profiled(host=False) as profile:
        for _ in range(steps + 1):
            replay()
    records = _gpu_records(profile)
    if len(records) != (steps + 1) * kernels:
        raise RecordsError(f"{steps + 1} replays of {kernels} kernels left {len(records)} records")
    return records[kernels - 1 :]


def tracing_cost() -> float:
    """Microseconds that taking one record adds to a chain of kernels in a graph."""
    number = torch.zeros(1, device="cuda")

    def chain() -> torch.Tensor:
        for _ in range(_CHAIN):
            number.add_(1)
        return number

    replay = capture(chain).replay
    bare = statistics.median(time_cuda(replay, 20))
    first, *rest = traced_replays(replay, 20, _CHAIN)
    ends = [first.end_us, *(record.end_us for record in rest[_CHAIN - 1 :: _CHAIN])]
    traced = statistics.median(after - before for before, after in pairwise(ends))
    return max(0.0, traced - bare) / _CHAIN
