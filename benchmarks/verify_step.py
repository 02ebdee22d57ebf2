"""The step that checks a draft's guesses, beside a plain one, and forms of their attention: all in one run.

    python benchmarks/verify_step.py

takes about a minute on an H200. SmolLM2 and the draft that comes with it, one user, greedy, one guess counted as right
in every step; `plain` has no draft. Forms of both: what the start chose (it times both ways, see the log), `older`
attention (rotation and write, splits, combine: three launches), `rows` (two, which ask for the cache before they wait),
`rows-small` (the same, of one row in programs that take so little memory that many have room on a processor).
The last lines name the winners, and how many plain steps the chosen form takes: guesses are worth it where a step
brings more tokens.

    python benchmarks/verify_step.py --model llama-1b --spec off --context 20000

has the plain forms alone, of any preset with random weights.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from variants import fields, verdict

from lowlat.bench.arms.base import StepCase
from lowlat.bench.arms.general import GeneralArm
from lowlat.bench.presets import PRESETS, any_shape
from lowlat.bench.results import Simulated, check_folder, new_result, row_from_interval, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat.engine import row_kernels
from lowlat.layers.triton.row_attention import RowShape
from lowlat.layers.triton_ops import EVERY

FORMS: dict[str, tuple[bool | None, int]] = {
    "": (None, 0), " older": (False, 0), " rows": (True, 0), " rows-small": (True, 3),
}  # fmt: skip
"""Whether attention of few rows has kernels of its own (None: as the start finds), and stages of one row's where it has
no masks (0: the default)."""


@contextmanager
def forced(by_rows: bool | None, stages: int) -> Iterator[None]:
    """Inside, engines start with this attention of one row and of several."""
    module: Any = row_kernels
    choose, of = module.choose_row_kernels, RowShape.of

    def shaped(*given: Any, **named: Any) -> RowShape:
        shape = of(*given, **named)
        return msgspec.structs.replace(shape, stages=stages) if stages and shape.lean else shape

    def chosen(model: Any, ops: Any, *rest: Any) -> dict[str, str]:
        found: dict[str, str] = choose(model, ops, *rest)
        if by_rows is not None:
            ops.row_attention = ops.one_row_attention = EVERY if by_rows else 0
        return found

    module.choose_row_kernels, RowShape.of = chosen, shaped  # type: ignore[assignment]
    try:
        yield
    finally:
        module.choose_row_kernels, RowShape.of = choose, of  # type: ignore[method-assign]


def main() -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, or smollm2")
    parser.add_argument("--spec", default="dspark")
    parser.add_argument("--draft")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of an arm in a round, each way")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = check_folder(got.results)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    shape = any_shape(got.model)
    common: dict[str, Any] = {"shape": shape, "context": got.context, "device": "cuda", "steps": got.steps}
    if got.model == "smollm2" or got.model not in PRESETS:
        common["model"] = got.model
    engines = {}
    for arm in ("plain",) if got.spec == "off" else ("plain", "general"):
        for form, (by_rows, stages) in FORMS.items():
            if stages and arm != "plain":
                continue
            case = StepCase(**common) if arm == "plain" else StepCase(**common, spec=got.spec, draft=got.draft)
            with forced(by_rows, stages):
                engines[arm + form] = GeneralArm(case)
    measured = alternate({name: engine.measure for name, engine in engines.items()}, got.rounds)
    for name, error in measured.errors.items():
        print(f"   {name} broke and is left out: {error}", flush=True)
    simulated = Simulated(weights="model" not in common, acceptance=got.spec != "off")
    result = new_result("verify-step", simulated=simulated, gpus=1)
    where = {"context": got.context, "dtype": "bfloat16", "concurrency": 1}
    samples = {name: measured.samples(name) for name in measured.rounds}
    for name, times in samples.items():
        plain = name.startswith("plain")
        workload = f"{shape.name}, {'plain' if plain else got.spec}"
        about: dict[str, Any] = {**where, **fields(name.replace("plain", "general"), workload)}
        about["note"] = engines[name].note
        row = row_from_samples(times, metric="step_us", draft=None if plain else got.spec, **about)
        result.rows.append(row)
        print(f"{name:16} {row.median:8.1f} us [{row.low:.1f}, {row.high:.1f}]", flush=True)
    for arm in ("plain", "general"):
        if arm in samples:
            print(f"   {arm}: {verdict(samples, arm=arm).strip()}")
    if {"general", "plain"} <= set(samples):
        ratio, steps = measured.ratio("general", "plain"), measured.ratio("plain", "general")
        print(f"   a step with guesses takes {ratio.value:.3f} plain ones [{ratio.low:.3f}, {ratio.high:.3f}]")
        over = {"workload": f"{shape.name}, {got.spec} over plain, steps", "draft": got.spec, **where}
        result.rows.append(row_from_interval(steps, arm="general", metric="speedup", **over))
    path = save(result, folder)
    print(path)
    return path


if __name__ == "__main__":
    main()
