"""The one benchmark result format: what a file holds, how it is stamped, checked, written and read.

Importing this needs msgspec and the standard library alone. A script that measures something does

    result = new_result("dense-step", simulated=Simulated(weights=True), read_ceiling_tb_s=4.54)
    result.rows.append(row_from_samples(samples_us, workload="llama-1b", arm="general", metric="step_us", context=1024))
    print(save(result))
"""

from __future__ import annotations

import datetime
import math
import pathlib
import re
import tempfile
from collections.abc import Sequence

import msgspec

from lowlat.bench.stamp import Machine, command_line, repository_root, source_stamp, this_machine
from lowlat.bench.stats import Interval, median_interval

SCHEMA = 1

ARMS = frozenset({
    "general", "lowlat-nvidia", "lowlat-amd", "lowlat-cpu", "torch-eager-graph", "torch-compile", "transformers",
    "vllm", "sglang", "nccl", "read-floor", "scripted",
})  # fmt: skip
"""Known arms. Somebody else's kernel library is written `plugin:NAME`; `scripted` is the server of the trust test;
`nccl` stands for sums over ranks by NCCL where lowlat has its own."""

TIMES = frozenset({
    "step_us", "layer_us", "ttft_ms", "itl_ms_p90", "latency_ms", "host_us_per_step", "region_us", "ready_ms",
})  # fmt: skip
"""Metrics that are a duration: smaller is better, and machine noise is in them."""

LOWER_IS_BETTER = TIMES | {"host_instructions_per_step"}

METRICS = LOWER_IS_BETTER | {
    "tokens_per_s_user", "tokens_per_s_total", "interactivity_p90", "e2e_interactivity_p90", "accept_length", "speedup",
    "goodput",
}  # fmt: skip


COUNTS = (
    "tp", "rows", "concurrency", "context", "bytes", "input_tokens", "output_tokens", "cached_tokens", "width",
    "accept_length", "instances",
)  # fmt: skip
"""Fields of a row that cannot be below 0."""


class Simulated(msgspec.Struct, forbid_unknown_fields=True):
    """What was not real: random weights, and a forced acceptance of drafts. Both must be said."""

    weights: bool
    acceptance: bool = False


class Row(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One measured value. `low` and `high` end the 95 % bootstrap interval of the median.

    `rows` is the number of query tokens of a step, `context` the tokens already in the cache (a step) or of the prompt
    (a load), `bytes` what the step must read and write at least once, `ceiling_fraction` those bytes over the measured
    time as a fraction of the read ceiling of the same run. `concurrency` is the number of requests or agent runs at a
    time that was reached, 0 in an open loop, which keeps none.
    """

    workload: str
    arm: str
    metric: str
    median: float
    low: float
    high: float
    samples: int
    rows: int = 1
    context: int = 0
    tp: int = 1
    dtype: str = ""
    concurrency: int = 1
    bytes: int | None = None
    ceiling_fraction: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    width: int | None = None
    draft: str | None = None
    accept_length: float | None = None
    instances: int | None = None
    details: dict[str, float | int | str | bool] = {}
    """Further figures of the same measurement, such as `mean`, `p90`, `p99` or the name of a region."""
    note: str = ""


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One run of one benchmark on one machine."""

    schema: int
    name: str
    date: str
    commit: str
    tree: str = ""
    """Hash of the sources that ran (see `stamp.source_hash`); the commit alone lies where files were edited since."""
    dirty: bool = False
    command: str
    machine: Machine
    simulated: Simulated
    read_ceiling_tb_s: float | None = None
    """Pure read bandwidth measured in this run, in TB/s; None where the benchmark says nothing about bytes."""
    incomplete: str = ""
    """Why the run ended before it had measured all that was asked for; empty where it measured all."""
    rows: list[Row] = []


class Problem(msgspec.Struct, frozen=True):
    """One reason why a result is refused: a code for machines, where it is, and what to do about it."""

    code: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.code}]"


class ResultError(ValueError):
    """A result that may not be quoted; `problems` holds every reason at once."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = list(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{source} is refused:\n{lines}")


def new_result(
    name: str,
    *,
    simulated: Simulated,
    read_ceiling_tb_s: float | None = None,
    command: str | None = None,
    gpus: int | None = None,
) -> Result:
    """An empty result stamped with this machine, its versions, the commit, the tree hash, the command and the time.

    `gpus` is the number of GPUs that the run uses (default: 1 where the machine has any). A machine without git takes
    the commit and the tree hash from LOWLAT_COMMIT and LOWLAT_TREE (`python -m lowlat.bench.stamp` prints both).
    """
    stamp = source_stamp()
    return Result(
        schema=SCHEMA,
        name=name,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=stamp.commit,
        tree=stamp.tree,
        dirty=stamp.dirty,
        command=command or command_line(),
        machine=this_machine(gpus),
        simulated=simulated,
        read_ceiling_tb_s=read_ceiling_tb_s,
    )


def row_from_interval(interval: Interval, *, workload: str, arm: str, metric: str, **fields: object) -> Row:
    """A row from an estimate that carries its own interval (a P90, a ratio)."""
    known = {"median": interval.value, "low": interval.low, "high": interval.high, "samples": interval.samples}
    return msgspec.convert({"workload": workload, "arm": arm, "metric": metric, **known, **fields}, Row)


def row_from_samples(
    samples: Sequence[float],
    *,
    workload: str,
    arm: str,
    metric: str,
    read_ceiling_tb_s: float | None = None,
    **fields: object,
) -> Row:
    """A row from raw samples: median, interval and count; further keywords are fields of `Row`.

    With `bytes` and `read_ceiling_tb_s`, and a metric in microseconds, the fraction of the ceiling is filled in.
    """
    row = row_from_interval(median_interval(samples), workload=workload, arm=arm, metric=metric, **fields)
    if row.bytes and read_ceiling_tb_s and metric.endswith("_us") and row.ceiling_fraction is None:
        row.ceiling_fraction = round(row.bytes / (row.median * 1e-6) / (read_ceiling_tb_s * 1e12), 4)
    return row


def known_arm(arm: str) -> bool:
    """Whether `arm` may stand in a result."""
    return arm in ARMS or bool(re.fullmatch(r"plugin:[a-z0-9][a-z0-9._-]*", arm))


def library_arm(kernels: str) -> str:
    """What results call the arm of a kernel library."""
    return kernels if known_arm(kernels) else f"plugin:{kernels}"


def _row_problems(row: Row, where: str) -> list[Problem]:
    found = []

    def refuse(code: str, message: str) -> None:
        found.append(Problem(code, where, message))

    if not row.workload:
        refuse("missing-workload", "name the preset or describe the workload")
    if not known_arm(row.arm):
        refuse("unknown-arm", f"arm {row.arm!r} is none of {', '.join(sorted(ARMS))} or plugin:NAME")
    if row.metric not in METRICS:
        refuse("unknown-metric", f"metric {row.metric!r} is none of {', '.join(sorted(METRICS))}")
    if not all(math.isfinite(v) for v in (row.median, row.low, row.high)):
        refuse("not-finite", "median, low and high must be finite numbers")
    elif not row.low <= row.median <= row.high:
        refuse("interval-disordered", f"low {row.low} <= median {row.median} <= high {row.high} does not hold")
    elif row.median < 0 or (row.metric in TIMES and row.median == 0):
        refuse("impossible-value", f"a {row.metric} of {row.median}")
    below = [name for name in COUNTS if (getattr(row, name) or 0) < 0]
    if below:
        refuse("impossible-shape", f"{', '.join(below)} below 0")
    if row.ceiling_fraction is not None and row.ceiling_fraction < 0:
        refuse("impossible-value", f"{row.ceiling_fraction} of the read ceiling")
    if row.samples < 1:
        refuse("no-samples", "a value without samples was not measured")
    if row.metric in ("step_us", "layer_us", "region_us") and not row.dtype:
        refuse("missing-dtype", f"a {row.metric} row says its dtype")
    if row.ceiling_fraction is not None and not row.bytes:
        refuse("missing-bytes", "a fraction of the ceiling needs the bytes it was computed from")
    if row.ceiling_fraction is not None and row.ceiling_fraction > 1.05:
        refuse("above-ceiling", f"{row.ceiling_fraction:.2f} of the read ceiling: bytes, time or ceiling is wrong")
    return found


def problems(result: Result) -> list[Problem]:
    """Every reason why `result` may not be quoted; empty where it may."""
    found = []

    def refuse(code: str, where: str, message: str) -> None:
        found.append(Problem(code, where, message))

    if result.schema != SCHEMA:
        refuse("unknown-schema", "schema", f"this version reads schema {SCHEMA}, the file has {result.schema}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", result.name):
        refuse("bad-name", "name", f"{result.name!r} must be lower-case words joined by hyphens")
    try:
        datetime.datetime.strptime(result.date, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        refuse("bad-date", "date", f"{result.date!r} is not UTC as 2026-12-01T10:00:00Z")
    if not re.fullmatch(r"[0-9a-f]{7,64}", result.commit):
        refuse("missing-commit", "commit", "no git commit: set LOWLAT_COMMIT where the run has no git")
    if result.read_ceiling_tb_s is not None and not 0 < result.read_ceiling_tb_s < math.inf:
        refuse("impossible-value", "read_ceiling_tb_s", f"a read ceiling of {result.read_ceiling_tb_s} TB/s")
    if result.machine.gpus < 0:
        refuse("impossible-value", "machine", f"{result.machine.gpus} GPUs")
    if result.dirty and not result.tree:
        refuse("missing-tree", "tree", "files differ from the commit: the tree hash says which sources ran")
    if not result.command.strip():
        refuse("missing-command", "command", "the command that repeats the run")
    machine = result.machine
    if not machine.cpu or (machine.gpus > 0 and not machine.gpu):
        refuse("missing-machine", "machine", "name the CPU, and the GPU where one was used")
    if not machine.python or not machine.torch or (machine.gpus > 0 and not machine.driver):
        refuse("missing-versions", "machine", "python and torch versions, and the driver where a GPU was used")
    if not result.rows:
        refuse("no-rows", "rows", "nothing was measured")
    for index, row in enumerate(result.rows):
        found.extend(_row_problems(row, f"rows[{index}]"))
        if row.ceiling_fraction is not None and not result.read_ceiling_tb_s:
            refuse("missing-ceiling", f"rows[{index}]", "a fraction of a ceiling that the run did not measure")
    return found


def check(result: Result, source: str = "result") -> Result:
    """`result` itself; raises ResultError with every problem where it has any."""
    found = problems(result)
    if found:
        raise ResultError(source, found)
    return result


def slug(*parts: str) -> str:
    """Words of `parts` in lower case, joined by hyphens: how results and their files are named."""
    text = " ".join(parts)
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def file_name(result: Result) -> str:
    """`<subject>-<machine>-<date>.json`; several GPUs show as `4x-nvidia-h200`."""
    machine = result.machine
    name = slug(machine.gpu) if machine.gpus else slug(re.sub(r"\(.*?\)|CPU|Processor|@.*", " ", machine.cpu))
    count = f"{machine.gpus}x-" if machine.gpus > 1 else ""
    return f"{result.name}-{count}{name or 'unknown'}-{result.date[:10]}.json"


def default_directory() -> pathlib.Path:
    """`benchmarks/results` of the checkout, or of the working directory where there is none."""
    return (repository_root() or pathlib.Path.cwd()) / "benchmarks" / "results"


def check_folder(directory: str | pathlib.Path | None = None) -> pathlib.Path:
    """The folder of results (default: benchmarks/results), made where it is missing: to be called before measuring.

    Raises ValueError naming the cause where no file can be written there.
    """
    folder = pathlib.Path(directory) if directory is not None else default_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise ValueError(f"{folder} is a file: results need a folder") from error
    except OSError as error:
        raise ValueError(f"results cannot be written into {folder}: {error.strerror or error}") from error
    return folder


def save(
    result: Result, directory: str | pathlib.Path | None = None, *, over: pathlib.Path | None = None
) -> pathlib.Path:
    """Check `result` and write it into `directory` (default: benchmarks/results); returns the path.

    Never overwrites: a second run of a day gets `-2` before `.json`. `over`: an earlier state of this result, whose
    place it takes; that stays whole where writing fails. Raises ResultError where it may not be quoted, and ValueError
    where nothing can be written into the folder.
    """
    check(result, f"result {result.name!r}")
    folder = check_folder(directory)
    stem = file_name(result).removesuffix(".json")
    text = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
    if over is not None:
        _put(text, over)
        return over
    for number in range(1, 1000):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            path.open("xb").close()  # the name is ours from here on
        except FileExistsError:
            continue
        try:
            _put(text, path)
        except OSError:
            path.unlink()
            raise
        return path
    raise FileExistsError(f"{folder} holds 999 results of {stem}: move old ones away")


def _put(text: bytes, path: pathlib.Path) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".json.part")
    try:
        part.write_bytes(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | pathlib.Path) -> Result:
    """Read and check one file. Raises ResultError naming every problem, and FileNotFoundError."""
    path = pathlib.Path(path)
    raw = path.read_bytes()
    try:
        result = msgspec.json.decode(raw, type=Result)
    except msgspec.DecodeError as error:
        raise ResultError(str(path), [_decode_problem(error, raw)]) from error
    return check(result, str(path))


def _decode_problem(error: msgspec.DecodeError, raw: bytes) -> Problem:
    text = str(error)
    missing = re.search(r"missing required field `(\w+)`", text)
    at = re.search(r"at `\$\.?(.*?)`", text)
    where = at.group(1) if at else "file"
    if missing:
        return Problem(f"missing-{missing.group(1)}", where, f"{missing.group(1)} is required")
    if "unknown field" in text:
        return Problem("unknown-field", where, text)
    return Problem("unreadable", where, text if raw.strip() else "the file is empty")


def load_all(directory: str | pathlib.Path | None = None) -> list[tuple[pathlib.Path, Result]]:
    """All results of a folder, oldest first. Raises ResultError for the first file that is refused."""
    folder = pathlib.Path(directory) if directory is not None else default_directory()
    found = [(path, load(path)) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda pair: (pair[1].date, pair[0].name))
