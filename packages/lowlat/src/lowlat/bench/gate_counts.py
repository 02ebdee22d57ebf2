"""What `lowlat bench gate` counts today: host work of these scenarios, bytes of these steps, times of these turns."""

from __future__ import annotations

from collections.abc import Callable

from lowlat.bench.gate import (
    Baseline,
    Finding,
    Limit,
    fixed_work_s,
    host_instructions,
    judge_bytes,
    judge_instructions,
    judge_times,
    kernel_byte_counts,
    python_version,
)
from lowlat.bench.host_work import seconds_per_step
from lowlat.bench.presets import PRESETS
from lowlat.bench.roofline import dense_step_bytes, v41_step_bytes

KERNEL_COUNTERS = ("lowlat_nvidia.counts:step_bytes",)
HOST_WORK = (("decode", 8), ("churn", 4))
TOLERANCE = 0.03

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


def current_baseline(say: Say) -> Baseline:
    """Count everything now."""
    names = [f"{scenario}-{requests}" for scenario, requests in HOST_WORK]
    instructions = {}
    for (scenario, requests), name in zip(HOST_WORK, names):
        say(f"counting instructions of {name}")
        instructions[name] = Limit(value=round(host_instructions(scenario, requests)), tolerance=TOLERANCE)
    return Baseline(
        python=python_version(),
        instructions=instructions,
        bytes=step_byte_counts() | kernel_byte_counts(KERNEL_COUNTERS),
        counters=list(KERNEL_COUNTERS),
        times={name: round(time_ratio(name), 6) for name in names},
    )


def run_gate(baseline: Baseline, *, only: str | None, say: Say) -> list[Finding]:
    """Judge what is asked for, cheapest first."""
    findings: list[Finding] = []
    if only in (None, "bytes"):
        findings += judge_bytes(baseline, step_byte_counts() | kernel_byte_counts(baseline.counters))
    if only in (None, "times"):
        say("timing host work")
        findings += judge_times(baseline, time_ratio)
    if only in (None, "instructions"):

        def count(scenario: str, requests: int) -> float:
            say(f"counting instructions of {scenario}-{requests}")
            return host_instructions(scenario, requests)

        findings += judge_instructions(baseline, count)
    return findings
