"""`lowlat bench gate`: judges in CI what does not depend on a busy machine, and times only where they are far off.

Host work is judged by instructions that callgrind counts around a scripted executor; steps by the bytes that they must
move, and kernels by the bytes that they read by their plans; times only as a ratio to a fixed piece of work in the same
run, and only beyond 1.5 times after three repeats.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lowlat.bench.stamp import repository_root
from lowlat_plugin.registry import load_object

SHORT_STEPS, LONG_STEPS = 40, 240
TIME_FACTOR = 1.5
TIME_REPEATS = 3


class Limit(msgspec.Struct, kw_only=True):
    """What was counted when the baseline was taken, and the relative growth that passes."""

    value: float
    tolerance: float


class Baseline(msgspec.Struct, kw_only=True):
    """The gate's file. Instruction counts belong to one Python version, since the interpreter is most of them."""

    python: str
    instructions: dict[str, Limit] = {}
    bytes: dict[str, int] = {}
    counters: list[str] = []
    """Functions `module:name` of kernel libraries that say how many bytes their kernels read: name to bytes."""
    times: dict[str, float] = {}
    """Host seconds a step over the seconds of the fixed piece of work."""


class Finding(msgspec.Struct, kw_only=True):
    """One judgement: `ok`, `worse`, `better` (the baseline may be lowered) or `not judged`, with figures and reason."""

    kind: str
    name: str
    verdict: str
    value: float | None = None
    baseline: float | None = None
    reason: str = ""


def default_baseline() -> pathlib.Path:
    """`benchmarks/gate.json` of the checkout."""
    return (repository_root() or pathlib.Path.cwd()) / "benchmarks" / "gate.json"


def python_version() -> str:
    """The version that instruction counts depend on, such as 3.11."""
    return ".".join(platform.python_version_tuple()[:2])


def _callgrind(arguments: list[str], timeout_s: float) -> int:
    """Instructions that `python ARGUMENTS` executes; addresses and hashes are fixed, so the count repeats.

    `timeout_s` is processor time: on a busy machine the same count takes many times as long.
    """
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    prefix = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    limited = ["prlimit", f"--cpu={int(timeout_s)}"] if shutil.which("prlimit") else []
    try:
        done = subprocess.run(
            [*limited, *prefix, *valgrind, sys.executable, *arguments],
            env=environment, capture_output=True, text=True, timeout=10 * timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"callgrind on {arguments} did not end within {error.timeout:g} s") from error
    counted = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or counted is None:
        raise RuntimeError(f"callgrind failed on {arguments}: {done.stderr.strip()[-400:]}")
    return int(counted.group(1))


def host_instructions(scenario: str, requests: int, *, timeout_s: float = 300.0) -> float:
    """Instructions of host work a step: the difference of a long and a short run, so start-up cancels.

    Raises FileNotFoundError where valgrind is not installed and RuntimeError where the work fails.
    """
    if shutil.which("valgrind") is None:
        raise FileNotFoundError("valgrind counts instructions: apt-get install valgrind")
    counts = [
        _callgrind(
            [
                "-m",
                "lowlat.bench.host_work",
                "--scenario",
                scenario,
                "--requests",
                str(requests),
                "--steps",
                str(steps),
            ],
            timeout_s,
        )
        for steps in (SHORT_STEPS, LONG_STEPS)
    ]
    return (counts[1] - counts[0]) / (LONG_STEPS - SHORT_STEPS)


def fixed_work_s() -> float:
    """Seconds of a piece of work that never changes: dictionaries, lists and attribute look-ups, as host work is."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        table: dict[int, list[int]] = {}
        for index in range(20000):
            table.setdefault(index % 97, []).append(index)
        sum(len(values) for values in table.values())
        best = min(best, time.perf_counter() - start)
    return best


def judge_instructions(
    baseline: Baseline, count: Callable[[str, int], float], names: list[str] | None = None
) -> list[Finding]:
    """Compare instruction counts, named SCENARIO-REQUESTS, with the baseline."""
    findings = []
    for name, limit in baseline.instructions.items():
        if names is not None and name not in names:
            continue
        if baseline.python != python_version():
            reason = f"the baseline is for Python {baseline.python}, this is {python_version()}"
            findings.append(Finding(kind="instructions", name=name, verdict="not judged", reason=reason))
            continue
        scenario, _, requests = name.rpartition("-")
        value = count(scenario, int(requests))
        change = value / limit.value - 1.0
        verdict = "worse" if change > limit.tolerance else "better" if change < -limit.tolerance else "ok"
        findings.append(
            Finding(
                kind="instructions", name=name, verdict=verdict, value=round(value), baseline=limit.value,
                reason=f"{change:+.1%}, tolerance {limit.tolerance:.0%}",
            )
        )  # fmt: skip
    return findings


def judge_bytes(baseline: Baseline, counts: Mapping[str, int]) -> list[Finding]:
    """Bytes of a step must not grow at all; fewer are better, and a name without a count is not judged."""
    findings = []
    for name, expected in baseline.bytes.items():
        value = counts.get(name)
        if value is None:
            findings.append(Finding(kind="bytes", name=name, verdict="not judged", reason="nothing counts it here"))
            continue
        verdict = "ok" if value == expected else "worse" if value > expected else "better"
        findings.append(Finding(kind="bytes", name=name, verdict=verdict, value=value, baseline=expected))
    return findings


def kernel_byte_counts(counters: Sequence[str]) -> dict[str, int]:
    """What the counters of kernel libraries say; a library that is not installed counts nothing."""
    counts: dict[str, int] = {}
    for counter in counters:
        with contextlib.suppress(ImportError):
            counts.update(load_object(counter)())
    return counts


def judge_times(baseline: Baseline, measure: Callable[[str], float]) -> list[Finding]:
    """Compare time ratios with the baseline; a value is worse only where three repeats in a row exceed 1.5 times."""
    findings = []
    for name, expected in baseline.times.items():
        value = float("inf")
        for _ in range(TIME_REPEATS):
            value = min(value, measure(name))
            if value <= TIME_FACTOR * expected:
                break
        verdict = "worse" if value > TIME_FACTOR * expected else "ok"
        reason = f"{value / expected:.2f} times, limit {TIME_FACTOR:g} after {TIME_REPEATS} repeats"
        findings.append(
            Finding(kind="times", name=name, verdict=verdict, value=round(value, 6), baseline=expected, reason=reason)
        )
    return findings


def load_baseline(path: str | pathlib.Path) -> Baseline:
    """Read a baseline. Raises ValueError naming the file where it cannot be read."""
    place = pathlib.Path(path)
    try:
        return msgspec.json.decode(place.read_bytes(), type=Baseline)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{place}: no baseline of the gate ({error}); `lowlat bench gate --update` writes one"
        ) from error


def save_baseline(baseline: Baseline, path: str | pathlib.Path) -> None:
    """Write a baseline whole or not at all."""
    place = pathlib.Path(path)
    fresh = place.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1) + b"\n")
    fresh.replace(place)
