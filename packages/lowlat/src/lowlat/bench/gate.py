"""`lowlat bench gate`: judges in CI what does not depend on a busy machine, and times only where they are far off.

Host work is judged by instructions that callgrind counts around a scripted executor; steps by the bytes that they must
move, and kernels by the bytes that they read by their plans; times only as a ratio to a fixed piece of work in the same
run, and only beyond 1.5 times after three repeats. What the baseline and today's counts do not share fails, and so does
a gate that judged nothing of a kind: an empty file must not pass.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from lowlat.bench.stamp import repository_root
from lowlat_plugin.registry import load_object

SHORT_STEPS, LONG_STEPS = 40, 240
TOLERANCE = 0.03
TIME_FACTOR = 1.5
TIME_REPEATS = 3
FAILING = frozenset({"worse", "gone", "new"})


class Limit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was counted when the baseline was taken, and the relative growth that passes."""

    value: float
    tolerance: float


class Baseline(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The gate's file. Instruction counts belong to one Python version, since the interpreter is most of them."""

    python: str
    instructions: dict[str, Limit] = {}
    bytes: dict[str, int] = {}
    kernel_bytes: dict[str, dict[str, int]] = {}
    """By function `module:name` of a kernel library, which says how many bytes its kernels read: name to bytes."""
    times: dict[str, float] = {}
    """Host seconds a step over the seconds of the fixed piece of work."""


class Finding(msgspec.Struct, kw_only=True):
    """One judgement, with figures and reason: `ok`, `worse`, `better` (the baseline may be lowered), `gone` (nothing
    counts any more what the baseline holds), `new` (the baseline does not hold it) or `not judged`."""

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


def _unmatched(kind: str, held: Collection[str], counted: Collection[str]) -> list[Finding]:
    """Names that only the baseline holds, and names that it lacks."""
    gone, new = "nothing counts it any more", "the baseline lacks it"
    return [
        Finding(kind=kind, name=name, verdict=verdict, reason=f"{reason}; `--update` where that is meant")
        for verdict, reason, names in (
            ("gone", gone, [name for name in held if name not in counted]),
            ("new", new, [name for name in counted if name not in held]),
        )
        for name in names
    ]


def judge_instructions(
    baseline: Baseline, count: Callable[[str, int], float], counted: Collection[str]
) -> list[Finding]:
    """Compare instruction counts, named SCENARIO-REQUESTS, with the baseline; `counted` are those of today."""
    findings = _unmatched("instructions", baseline.instructions, counted)
    for name, limit in baseline.instructions.items():
        if name not in counted:
            continue
        if baseline.python != python_version():
            reason = f"the baseline is for Python {baseline.python}, this is {python_version()}"
            findings.append(Finding(kind="instructions", name=name, verdict="not judged", reason=reason))
            continue
        scenario, _, requests = name.rpartition("-")
        value = count(scenario, int(requests))
        change = value / limit.value - 1.0
        verdict = "better" if change < -limit.tolerance else "ok" if change <= limit.tolerance else "worse"
        findings.append(
            Finding(
                kind="instructions", name=name, verdict=verdict, value=round(value), baseline=limit.value,
                reason=f"{change:+.1%}, tolerance {limit.tolerance:.0%}",
            )
        )  # fmt: skip
    return findings


def judge_bytes(held: Mapping[str, int], counts: Mapping[str, int]) -> list[Finding]:
    """Bytes of a step must not grow at all; fewer are better."""
    findings = _unmatched("bytes", held, counts)
    for name, expected in held.items():
        if name in counts:
            value = counts[name]
            verdict = "ok" if value == expected else "worse" if value > expected else "better"
            findings.append(Finding(kind="bytes", name=name, verdict=verdict, value=value, baseline=expected))
    return findings


def judge_kernel_bytes(held: Mapping[str, Mapping[str, int]], counters: Collection[str]) -> list[Finding]:
    """The same of what the counters of kernel libraries say; one whose library is not installed judges nothing."""
    findings = _unmatched("bytes", held, counters)
    for counter, expected in held.items():
        if counter not in counters:
            continue
        if not installed(counter):
            reason = f"{_package(counter)} is not installed"
            findings += [Finding(kind="bytes", name=name, verdict="not judged", reason=reason) for name in expected]
            continue
        try:
            counts = load_object(counter)()
        except Exception as error:  # somebody else's code: that it fails is the finding
            reason = f"{type(error).__name__}: {error}"
            findings.append(Finding(kind="bytes", name=counter, verdict="gone", reason=reason))
            continue
        findings += judge_bytes(expected, counts)
    return findings


def installed(counter: str) -> bool:
    """Whether the library of a counter `package.module:name` is installed."""
    return importlib.util.find_spec(_package(counter)) is not None


def _package(counter: str) -> str:
    return counter.partition(":")[0].partition(".")[0]


def judge_times(baseline: Baseline, measure: Callable[[str], float], counted: Collection[str]) -> list[Finding]:
    """Compare time ratios with the baseline; a value is worse only where three repeats in a row exceed 1.5 times."""
    findings = _unmatched("times", baseline.times, counted)
    for name, expected in baseline.times.items():
        if name not in counted:
            continue
        value = float("inf")
        for _ in range(TIME_REPEATS):
            value = min(value, measure(name))
            if value <= TIME_FACTOR * expected:
                break
        verdict = "ok" if value <= TIME_FACTOR * expected else "worse"
        reason = f"{value / expected:.2f} times, limit {TIME_FACTOR:g} after {TIME_REPEATS} repeats"
        findings.append(
            Finding(kind="times", name=name, verdict=verdict, value=round(value, 6), baseline=expected, reason=reason)
        )
    return findings


def not_judged(findings: Sequence[Finding]) -> list[str]:
    """For each kind of which nothing at all was judged, a sentence that says why."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    return [
        f"{kind}: nothing was judged ({'; '.join(dict.fromkeys(finding.reason for finding in of))})"
        for kind, of in by_kind.items()
        if all(finding.verdict == "not judged" for finding in of)
    ]


def check_baseline(baseline: Baseline) -> None:
    """Raise ValueError naming every part of a baseline by which nothing could fail."""
    wrong = [
        f"{section} is empty"
        for section in ("instructions", "bytes", "kernel_bytes", "times")
        if not getattr(baseline, section)
    ]
    wrong += [f"{counter} counts nothing" for counter, names in baseline.kernel_bytes.items() if not names]
    values: list[tuple[str, float]] = [(name, limit.value) for name, limit in baseline.instructions.items()]
    values += [item for names in (baseline.bytes, *baseline.kernel_bytes.values()) for item in names.items()]
    values += baseline.times.items()
    wrong += [f"{name} is {value:g}, and no count" for name, value in values if not 0 < value < math.inf]
    for name, limit in baseline.instructions.items():
        if not 0 < limit.tolerance <= TOLERANCE:
            wrong.append(f"the tolerance of {name} is {limit.tolerance:g}, and at most {TOLERANCE:g} is allowed")
    if wrong:
        raise ValueError("; ".join(wrong))


def load_baseline(path: str | pathlib.Path) -> Baseline:
    """Read a baseline. Raises ValueError naming the file where it cannot be read, or where it would judge nothing."""
    place = pathlib.Path(path)
    try:
        found = msgspec.json.decode(place.read_bytes(), type=Baseline)
        check_baseline(found)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ValueError(
            f"{place}: no baseline of the gate ({error}); `lowlat bench gate --update` writes one"
        ) from error
    return found


def save_baseline(baseline: Baseline, path: str | pathlib.Path) -> None:
    """Write a baseline whole or not at all. Raises ValueError where it would judge nothing."""
    check_baseline(baseline)
    place = pathlib.Path(path)
    fresh = place.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(baseline), indent=1) + b"\n")
    fresh.replace(place)
