"""`lowlat bench step`: one decode step, several arms in alternation, with the read ceiling of the same run."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from lowlat.bench.arms.base import ArmUnavailableError, StepArm, StepCase, build_arm, check_arm, check_model
from lowlat.bench.ceiling import Ceiling, measure_ceiling
from lowlat.bench.presets import DEEPSEEK_V41, V41_NAMES, DenseShape, FolderShape, any_shape
from lowlat.bench.results import Result, Row, Simulated, check, new_result, row_from_samples, save, slug
from lowlat.bench.roofline import DTYPE_BYTES, StepBytes, dense_step_bytes, v41_step_bytes
from lowlat.bench.stats import alternate

Say = Callable[[str], None]


class StepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: every combination of `rows` and `contexts` with every arm."""

    model: str = "smollm2"
    """One model, or several joined by commas: they are measured one after another."""
    model_folder: str | None = None
    """Real weights; None: random weights of the shape."""
    random_folder: bool = False
    """The folder's weights are random, written for measurements."""
    layers: int | None = None
    arms: tuple[str, ...] = ("general", "torch-eager-graph", "read-floor")
    rows: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1024,)
    dtype: str = "float32"
    device: str = "cpu"
    tp: int = 1
    rounds: int = 8
    steps: int = 5
    """Steps in one measurement; each round holds two measurements of each arm."""
    warmup: int = 1
    seed: int = 0
    ceiling_gb: float | None = None


class StepOutcome(msgspec.Struct):
    """The result, and the arms that could not run with their reasons."""

    result: Result
    unavailable: dict[str, str]


def step_bytes(options: StepOptions, rows: int, context: int, *, draft: bool = True) -> StepBytes | None:
    """Bytes of one step of the options' model, of a whole DeepSeek-V4.1 with its draft or without; None: not known."""
    if options.model == DEEPSEEK_V41:
        draft = draft and options.layers is None  # the draft reads the last layers
        return v41_step_bytes(rows=rows, context=context, tp=options.tp, layers=options.layers, draft=draft)
    if options.model in V41_NAMES:
        return None
    shape = any_shape(options.model, options.layers)
    if not isinstance(shape, DenseShape):
        return None
    return dense_step_bytes(shape, requests=rows, context=context, dtype=options.dtype, tp=options.tp)


def _build(options: StepOptions, case: StepCase, say: Say, unavailable: dict[str, str]) -> dict[str, StepArm]:
    """Every arm that can run here; the reasons of the others go into `unavailable`."""
    built: dict[str, StepArm] = {}
    for name in options.arms:
        if name == "read-floor":
            continue
        say(f"building {name}: {case.shape.name}, rows {case.requests}, context {case.context}")
        try:
            built[name] = build_arm(name, case)
        except ArmUnavailableError as error:
            unavailable[name] = str(error)
        except Exception as error:  # other people's engines fail in ways of their own; the other arms still count
            unavailable[name] = f"{type(error).__name__}: {error}"
        if name in unavailable:
            say(f"{name} is left out: {unavailable[name]}")
    return built


class _CpuShare:
    """How much of the wall-clock time of its measurements an arm's process really ran, by processor time."""

    def __init__(self, measure: Callable[[], list[float]]) -> None:
        self._measure = measure
        self._wall = self._processor = 0.0

    def __call__(self) -> list[float]:
        wall, processor = time.perf_counter(), time.process_time()
        samples = self._measure()
        self._wall += time.perf_counter() - wall
        self._processor += time.process_time() - processor
        return samples

    def share(self, threads: int) -> float:
        """Processor time over wall-clock time of `threads` threads; well below 1: the machine was busy otherwise."""
        return self._processor / (self._wall * threads) if self._wall else 0.0


def _mark_busy(row: Row, share: float, say: Say) -> None:
    """Say on a CPU's row how much of the time the process ran, and warn where others took a tenth or more."""
    row.details = {"cpu_share": round(share, 3)}
    if share < 0.9:
        row.note += f"; busy machine: this process ran {share:.0%} of the time"
        say(f"{row.arm}: the machine was busy, this process ran {share:.0%} of the time")


def _rows_of_case(options: StepOptions, case: StepCase, say: Say, unavailable: dict[str, str]) -> list[Row]:
    """Build, alternate and close the arms of one case."""
    built = _build(options, case, say, unavailable)
    if not built:
        return []
    notes = {name: arm.note for name, arm in built.items()}
    counted = step_bytes(options, case.requests, case.context, draft=False)

    def size_of(arm: StepArm) -> int | None:
        if counted is None:
            return None
        return counted.total if arm.weight_bytes is None else arm.weight_bytes + counted.kv + counted.embedding

    sizes = {name: size_of(arm) for name, arm in built.items()}
    clocked = {name: _CpuShare(arm.measure) for name, arm in built.items()}
    try:
        measured = alternate(
            clocked,
            options.rounds,
            warmup=options.warmup,
            progress=lambda arm, index, rounds: say(f"round {index} of {rounds}: {arm}"),
        )
    finally:
        for arm in built.values():
            arm.close()
    for name, error in measured.errors.items():
        unavailable[name] = error
        say(f"{name} broke and is left out: {error}")
    rows = []
    for name in measured.rounds:
        row = row_from_samples(
            measured.samples(name), workload=case.shape.name, arm=name, metric="step_us", rows=case.requests,
            context=case.context, tp=options.tp, dtype=case.dtype, concurrency=case.requests, bytes=sizes[name],
            note=notes[name],
        )  # fmt: skip
        if case.device == "cpu":
            import torch

            _mark_busy(row, clocked[name].share(torch.get_num_threads()), say)
        rows.append(row)
    return rows


def _floor_row(options: StepOptions, rows: int, context: int, ceiling: Ceiling, name: str, dtype: str) -> Row:
    counted = step_bytes(options, rows, context)
    if counted is None:
        raise ValueError(f"nothing counts the bytes of {name}: leave out read-floor")
    size = counted.total
    value = size / (ceiling.tb_s * 1e6)
    return Row(
        workload=name, arm="read-floor", metric="step_us", median=value, low=value, high=value, samples=1, rows=rows,
        context=context, tp=options.tp, dtype=dtype, concurrency=rows, bytes=size, ceiling_fraction=1.0,
        note=f"computed from the bytes of {dtype} weights and cache and the ceiling ({ceiling.method}, best pass)",
    )  # fmt: skip


def _shape(options: StepOptions) -> DenseShape | FolderShape:
    if options.model not in V41_NAMES:
        return any_shape(options.model, options.layers)
    from lowlat.bench.random_v41 import v41_shape

    return v41_shape(options.model, options.layers)


def _cases(options: StepOptions, shape: DenseShape | FolderShape, folder: str | None) -> list[StepCase]:
    return [
        StepCase(
            shape=shape, requests=rows, context=context, dtype=options.dtype, device=options.device, seed=options.seed,
            model=folder, steps=options.steps,
        )
        for rows in options.rows
        for context in options.contexts
    ]  # fmt: skip


def _measured(
    options: StepOptions, shape: DenseShape | FolderShape, say: Say, unavailable: dict[str, str]
) -> list[Row]:
    """Rows of every case; a DeepSeek-V4.1 without a folder is written for as long as that takes."""
    with contextlib.ExitStack() as stack:
        v41 = options.model in V41_NAMES
        folder = options.model_folder or (options.model if isinstance(shape, FolderShape) and not v41 else None)
        others = [arm for arm in options.arms if arm != "read-floor"]
        if v41 and others and options.device != "cpu":
            unavailable.update(dict.fromkeys(others, f"{shape.name} is computed on CPUs only: use --device cpu"))
            return []
        if folder is None and v41 and others:
            from lowlat.bench.random_v41 import make_v41

            say(f"writing {shape.name} with random weights")
            try:
                folder = stack.enter_context(make_v41(options.model, options.layers, options.seed))
            except ArmUnavailableError as error:
                unavailable.update(dict.fromkeys(others, str(error)))
                return []
        return [
            row for case in _cases(options, shape, folder) for row in _rows_of_case(options, case, say, unavailable)
        ]


def run_step(
    options: StepOptions,
    say: Say = lambda _: None,
    *,
    command: str | None = None,
    measured: Callable[[StepOutcome], None] = lambda outcome: None,
) -> StepOutcome:
    """Measure every case of every model and return one stamped result.

    The ceiling is measured before and behind each model, and the best value counts, since what disturbs it only lowers
    it. `measured` is told the outcome so far behind each model. Raises ValueError for options that describe no step,
    and RuntimeError where no arm could run.
    """
    check_options(options)
    names = options.model.split(",")
    each = [msgspec.structs.replace(options, model=name) for name in names]
    shapes = [_shape(one) for one in each]
    for shape in shapes:
        check_contexts(shape, options.contexts, options.steps)
    say("measuring the read ceiling")
    ceiling = measure_ceiling(options.device, gigabytes=options.ceiling_gb)
    unavailable: dict[str, str] = {}
    rows: list[Row] = []
    for number, (one, shape) in enumerate(zip(each, shapes, strict=True), 1):
        left_out: dict[str, str] = {}
        rows += _measured(one, shape, say, left_out)
        whose = f" of {shape.name}" if len(names) > 1 else ""
        unavailable |= {f"{arm}{whose}": reason for arm, reason in left_out.items()}
        again = measure_ceiling(options.device, gigabytes=options.ceiling_gb)
        ceiling = max(ceiling, again, key=lambda c: c.tb_s)
        outcome = StepOutcome(
            _result(options, shapes[0].name if len(names) == 1 else "presets", rows, ceiling, command), unavailable
        )
        outcome.result.rows += _floor_rows(each[:number], shapes, ceiling)
        if outcome.result.rows:
            measured(outcome)
    if not outcome.result.rows:
        reasons = "; ".join(f"{arm}: {reason}" for arm, reason in unavailable.items())
        raise RuntimeError(f"no arm could run ({reasons})")
    return outcome


def _floor_rows(each: Sequence[StepOptions], shapes: Sequence[DenseShape | FolderShape], ceiling: Ceiling) -> list[Row]:
    """The floor of every case, where it was asked for."""
    return [
        _floor_row(one, r, context, ceiling, shape.name, "fp8+fp4" if one.model == DEEPSEEK_V41 else one.dtype)
        for one, shape in zip(each, shapes, strict=False)
        if "read-floor" in one.arms
        for r in one.rows
        for context in one.contexts
    ]


def _result(options: StepOptions, subject: str, rows: Sequence[Row], ceiling: Ceiling, command: str | None) -> Result:
    random = options.model_folder is None or options.random_folder
    result = new_result(
        slug("step", subject, *(("random",) if random else ())),
        simulated=Simulated(weights=random),
        read_ceiling_tb_s=ceiling.tb_s,
        command=command,
        gpus=0 if options.device == "cpu" else 1,  # more ranks than one are known to the floor alone
    )
    for row in rows:
        if row.bytes:
            row.ceiling_fraction = round(row.bytes / (row.median * ceiling.tb_s * 1e6), 4)
    result.rows = list(rows)
    return result


def check_contexts(shape: DenseShape | FolderShape, contexts: Sequence[int], steps: int) -> None:
    """Raise ValueError naming the contexts in which `steps` steps do not fit."""
    too_long = [context for context in contexts if context + steps + 4 > shape.max_context]
    if too_long:
        raise ValueError(f"{shape.name} holds {shape.max_context} tokens: contexts {too_long} do not fit")


def check_options(options: StepOptions) -> None:
    """Raise ValueError naming the first option that makes no sense."""
    if options.device not in ("cpu", "cuda"):
        raise ValueError(f"device {options.device!r} is neither cpu nor cuda")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("device cuda: this machine has no GPU that torch can use")
    positive: dict[str, Sequence[int]] = {
        "rows": options.rows, "context": options.contexts, "rounds": (options.rounds,), "steps": (options.steps,),
        "tp": (options.tp,),
    }  # fmt: skip
    for name, values in positive.items():
        if not values or min(values) < 1:
            raise ValueError(f"{name} must be at least 1")
    if options.dtype not in DTYPE_BYTES:
        raise ValueError(f"--dtype {options.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if options.ceiling_gb is not None and options.ceiling_gb <= 0:
        raise ValueError("--ceiling-gb must be above 0")
    if not options.arms:
        raise ValueError("--arms names no arm")
    for name in options.arms:
        check_arm(name)
    if options.model_folder:
        check_model(options.model_folder)
    if options.tp > 1 and set(options.arms) - {"read-floor"}:
        raise ValueError("only the read-floor arm knows tp; measure tensor parallelism with `lowlat bench serve`")
    if options.model_folder and "," in options.model:
        raise ValueError("--model-folder holds the weights of one model: name one --model")
    if options.steps > 60:
        raise ValueError("at most 60 steps in a measurement: the context grows by one token with each")


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m lowlat.bench.step`: without typer, for a machine that holds torch, triton and msgspec alone."""
    import torch

    default = StepOptions()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default=default.model)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--arms", default=",".join(default.arms))
    parser.add_argument("--rows", default="1")
    parser.add_argument("--context", default="1024")
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--ceiling-gb", type=float)
    parser.add_argument("--results", help="folder to write the result into; default: print it")
    given = parser.parse_args(arguments)
    options = StepOptions(
        model=given.model, layers=given.layers, arms=tuple(given.arms.split(",")),
        rows=tuple(map(int, given.rows.split(","))), contexts=tuple(map(int, given.context.split(","))),
        dtype=given.dtype or ("float32" if given.device == "cpu" else "bfloat16"), device=given.device, tp=given.tp,
        rounds=given.rounds, steps=given.steps, ceiling_gb=given.ceiling_gb,
    )  # fmt: skip
    outcome = run_step(options, lambda text: print(text, file=sys.stderr, flush=True))
    if given.results:
        print(save(outcome.result, given.results))
    else:
        print(msgspec.json.format(msgspec.json.encode(check(outcome.result)), indent=1).decode())


if __name__ == "__main__":
    main()
