"""`lowlat bench step`: one decode step, several arms in alternation, with the read ceiling of the same run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence

import msgspec

from lowlat.bench.arms.base import ArmUnavailableError, StepArm, StepCase, build_arm
from lowlat.bench.busy import CpuShare, mark_busy
from lowlat.bench.ceiling import Ceiling, measure_ceiling
from lowlat.bench.keeper import Keeper
from lowlat.bench.presets import DEEPSEEK_V41, V41_NAMES, DenseShape, FolderShape, any_shape
from lowlat.bench.results import Result, Row, Simulated, check, new_result, row_from_samples, slug
from lowlat.bench.roofline import StepBytes, dense_step_bytes, v41_step_bytes
from lowlat.bench.stats import Alternation, alternate
from lowlat.bench.step_options import StepOptions, check_contexts, check_options, check_weights

Say = Callable[[str], None]


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


def _rows_of_case(
    options: StepOptions, case: StepCase, say: Say, unavailable: dict[str, str], tell: Callable[[list[Row]], None]
) -> None:
    """Build, alternate and close the arms of one case; `tell` gets their rows, also where that is ended early."""
    built = _build(options, case, say, unavailable)
    if not built:
        return
    notes = {name: arm.note for name, arm in built.items()}
    counted = step_bytes(options, case.requests, case.context, draft=False)

    def size_of(arm: StepArm) -> int | None:
        if counted is None:
            return None
        return counted.total if arm.weight_bytes is None else arm.weight_bytes + counted.kv + counted.embedding

    sizes = {name: size_of(arm) for name, arm in built.items()}
    shares = {name: CpuShare() for name in built}
    so_far: list[Alternation] = []

    def rows_of(found: Alternation) -> list[Row]:
        rows = []
        for name in found.rounds:
            row = row_from_samples(
                found.samples(name), workload=case.shape.name, arm=name, metric="step_us", rows=case.requests,
                context=case.context, tp=options.tp, dtype=case.dtype, concurrency=case.requests, bytes=sizes[name],
                note=notes[name],
            )  # fmt: skip
            if case.device == "cpu":
                import torch

                mark_busy(row, shares[name].of(torch.get_num_threads()), say)
            rows.append(row)
        return rows

    try:
        measured = alternate(
            {name: functools.partial(shares[name], arm.measure) for name, arm in built.items()},
            options.rounds,
            warmup=options.warmup,
            progress=lambda arm, index, rounds: say(f"round {index} of {rounds}: {arm}"),
            measured=so_far.append,
        )
    except BaseException:
        if so_far:
            tell(rows_of(so_far[-1]))
        raise
    finally:
        for arm in built.values():
            arm.close()
    for name, error in measured.errors.items():
        unavailable[name] = error
        say(f"{name} broke and is left out: {error}")
    tell(rows_of(measured))


def _floor_row(options: StepOptions, rows: int, context: int, ceiling: Ceiling, name: str, size: int) -> Row:
    dtype = "fp8+fp4" if options.model == DEEPSEEK_V41 else options.dtype
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


def _measure_model(
    options: StepOptions,
    shape: DenseShape | FolderShape,
    say: Say,
    unavailable: dict[str, str],
    tell: Callable[[list[Row]], None],
) -> None:
    """Tell the rows of every case; a DeepSeek-V4.1 without a folder is written for as long as that takes."""
    with contextlib.ExitStack() as stack:
        v41 = options.model in V41_NAMES
        folder = options.model_folder or (options.model if isinstance(shape, FolderShape) and not v41 else None)
        others = [arm for arm in options.arms if arm != "read-floor"]
        if v41 and others and options.device != "cpu":
            unavailable.update(dict.fromkeys(others, f"{shape.name} is computed on CPUs only: use --device cpu"))
            return
        if folder is None and v41 and others:
            from lowlat.bench.random_v41 import make_v41

            say(f"writing {shape.name} with random weights")
            try:
                folder = stack.enter_context(make_v41(options.model, options.layers, options.seed))
            except ArmUnavailableError as error:
                unavailable.update(dict.fromkeys(others, str(error)))
                return
        for case in _cases(options, shape, folder):
            _rows_of_case(options, case, say, unavailable, tell)


def run_step(
    options: StepOptions,
    say: Say = lambda _: None,
    *,
    command: str | None = None,
    begun: Callable[[Result], None] = lambda empty: None,
    measured: Callable[[StepOutcome], None] = lambda outcome: None,
) -> StepOutcome:
    """Measure every case of every model and return one stamped result.

    The ceiling is measured before and behind each model, and the best value counts, since what disturbs it only lowers
    it. `begun` is told the result before anything is measured; `measured` the outcome so far behind each case and
    model, and of a case that is ended early its whole rounds. Raises ValueError for options that describe no step, and
    RuntimeError where no arm could run.
    """
    check_options(options)
    names = tuple(dict.fromkeys(filter(None, options.model.split(","))))
    if not names:
        raise ValueError("--model names no model")
    each = [msgspec.structs.replace(options, model=name) for name in names]
    shapes = [_shape(one) for one in each]
    for shape in shapes:
        check_contexts(shape, options.contexts, options.steps)
        if options.model_folder:
            check_weights(options.model_folder, shape, options.layers)
    if len({shape.name for shape in shapes}) < len(shapes):
        raise ValueError(f"--model {options.model}: two models of one name could not be told apart; measure each alone")
    empty = _empty_result(options, shapes[0].name if len(names) == 1 else "presets", command)
    begun(empty)
    say("measuring the read ceiling")
    ceiling = measure_ceiling(options.device, gigabytes=options.ceiling_gb)
    unavailable: dict[str, str] = {}
    rows: list[Row] = []

    def outcome_of(number: int) -> StepOutcome:
        floors = [row for one, shape in zip(each[:number], shapes) for row in _floor_rows(one, shape, ceiling)]
        return StepOutcome(_filled(empty, rows, floors, ceiling), unavailable)

    def tell(found: list[Row]) -> None:
        rows.extend(found)
        if rows:
            measured(outcome_of(number - 1))

    for number, (one, shape) in enumerate(zip(each, shapes, strict=True), 1):
        left_out: dict[str, str] = {}
        _measure_model(one, shape, say, left_out, tell)
        if "read-floor" in one.arms and step_bytes(one, 1, 1) is None:
            left_out["read-floor"] = f"nothing counts the bytes of {shape.name}"
        whose = f" of {shape.name}" if len(names) > 1 else ""
        unavailable |= {f"{arm}{whose}": reason for arm, reason in left_out.items()}
        again = measure_ceiling(options.device, gigabytes=options.ceiling_gb)
        ceiling = max(ceiling, again, key=lambda c: c.tb_s)
        outcome = outcome_of(number)
        if outcome.result.rows:
            measured(outcome)
    if not outcome.result.rows:
        reasons = "; ".join(f"{arm}: {reason}" for arm, reason in unavailable.items())
        raise RuntimeError(f"no arm could run ({reasons})")
    return outcome


def _floor_rows(options: StepOptions, shape: DenseShape | FolderShape, ceiling: Ceiling) -> list[Row]:
    """The floor of every case, where it was asked for and is known."""
    if "read-floor" not in options.arms:
        return []
    return [
        _floor_row(options, rows, context, ceiling, shape.name, counted.total)
        for rows in options.rows
        for context in options.contexts
        if (counted := step_bytes(options, rows, context)) is not None
    ]


def _empty_result(options: StepOptions, subject: str, command: str | None) -> Result:
    random = options.model_folder is None or options.random_folder
    return new_result(
        slug("step", subject, *(("random",) if random else ())),
        simulated=Simulated(weights=random),
        command=command,
        gpus=0 if options.device == "cpu" else 1,  # more ranks than one are known to the floor alone
    )


def _filled(empty: Result, rows: Sequence[Row], floors: Sequence[Row], ceiling: Ceiling) -> Result:
    for row in rows:
        if row.bytes:
            row.ceiling_fraction = round(row.bytes / (row.median * ceiling.tb_s * 1e6), 4)
    return msgspec.structs.replace(empty, read_ceiling_tb_s=ceiling.tb_s, rows=[*rows, *floors])


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
    parser.add_argument("--results", type=pathlib.Path, help="folder to write the result into; default: print it")
    given = parser.parse_args(arguments)
    try:
        options = StepOptions(
            model=given.model, layers=given.layers, arms=tuple(given.arms.split(",")),
            rows=tuple(map(int, given.rows.split(","))), contexts=tuple(map(int, given.context.split(","))),
            dtype=given.dtype or ("float32" if given.device == "cpu" else "bfloat16"), device=given.device, tp=given.tp,
            rounds=given.rounds, steps=given.steps, ceiling_gb=given.ceiling_gb,
        )  # fmt: skip
        check_options(options)
        kept = Keeper(given.results is not None, given.results, as_json=True)
    except ValueError as error:
        parser.error(str(error))
    with kept:
        outcome = run_step(
            options, lambda text: print(text, file=sys.stderr, flush=True),
            begun=kept.begin, measured=lambda outcome: kept(outcome.result),
        )  # fmt: skip
        kept.end(outcome.result)
    if kept.path is not None:
        print(kept.path)
    else:
        print(msgspec.json.format(msgspec.json.encode(check(outcome.result)), indent=1).decode())


if __name__ == "__main__":
    main()
