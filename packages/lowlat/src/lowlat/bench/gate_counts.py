"""What `lowlat bench gate` counts today: host work of these scenarios, bytes of these steps, times of these turns."""

from __future__ import annotations

from collections.abc import Callable

from lowlat.bench.gate import (
    TOLERANCE,
    Baseline,
    Finding,
    Limit,
    fixed_work_s,
    host_instructions,
    installed,
    judge_bytes,
    judge_instructions,
    judge_kernel_bytes,
    judge_times,
    python_version,
)
from lowlat.bench.host_work import seconds_per_step
from lowlat.bench.presets import PRESETS
from lowlat.bench.roofline import dense_step_bytes, v41_step_bytes
from lowlat_plugin.registry import load_object

KERNEL_COUNTERS = ("lowlat_nvidia.counts:step_bytes",)
HOST_WORK = ("decode-8", "churn-4")
"""Scenarios of `host_work` and numbers of requests."""

Say = Callable[[str], None]


def step_byte_counts() -> dict[str, int]:
    """Bytes of a step for every preset at context 1,024, one and eight requests, and of DeepSeek-V4.1 at TP4."""
    counts = {
        f"{name} rows {rows} bfloat16": dense_step_bytes(shape, requests=rows, context=1024, dtype="bfloat16").total
        for name, shape in PRESETS.items()
        for rows in (1, 8)
    }
    counts["deepseek-v41 rows 6 tp 4"] = v41_step_bytes(rows=6, context=131072, tp=4).total
    return counts


def time_ratio(name: str) -> float:
    """Host seconds of a step of `SCENARIO-REQUESTS` over the seconds of the fixed piece of work."""
    scenario, _, requests = name.rpartition("-")
    return min(seconds_per_step(scenario, int(requests), 1000) for _ in range(3)) / fixed_work_s()


def kernel_byte_counts() -> dict[str, dict[str, int]]:
    """What the counters of kernel libraries say. Raises RuntimeError where a library is not installed."""
    absent = [counter for counter in KERNEL_COUNTERS if not installed(counter)]
    if absent:
        raise RuntimeError(f"a baseline without {', '.join(absent)} would not judge its kernels: install the library")
    return {counter: load_object(counter)() for counter in KERNEL_COUNTERS}


def _count(name: str, say: Say) -> float:
    say(f"counting instructions of {name} under callgrind, which takes minutes")
    scenario, _, requests = name.rpartition("-")
    return host_instructions(scenario, int(requests))


def current_baseline(say: Say) -> Baseline:
    """Count everything now. Raises RuntimeError where something cannot be counted here."""
    return Baseline(
        python=python_version(),
        bytes=step_byte_counts(),
        kernel_bytes=kernel_byte_counts(),
        times={name: round(time_ratio(name), 6) for name in HOST_WORK},
        instructions={name: Limit(value=round(_count(name, say)), tolerance=TOLERANCE) for name in HOST_WORK},
    )


def run_gate(baseline: Baseline, *, only: str | None, say: Say) -> list[Finding]:
    """Judge what is asked for, cheapest first."""
    findings: list[Finding] = []
    if only in (None, "bytes"):
        findings += judge_bytes(baseline.bytes, step_byte_counts())
        findings += judge_kernel_bytes(baseline.kernel_bytes, KERNEL_COUNTERS)
    if only in (None, "times"):
        say("timing host work")
        findings += judge_times(baseline, time_ratio, HOST_WORK)
    if only in (None, "instructions"):
        findings += judge_instructions(baseline, lambda scenario, n: _count(f"{scenario}-{n}", say), HOST_WORK)
    return findings
