"""The step that checks a draft's guesses, beside a plain one, and forms of its attention: all in one run.

    python benchmarks/verify_step.py

takes about a minute on an H200. SmolLM2 and the draft that comes with it, one user, greedy, one guess counted as right
in every step. Forms: what the start chose (it times both, see the log), `older` attention (rotation and write, splits,
combine: three launches), `rows` (two, which ask for the cache before they wait). `plain` has no draft. The last lines
name the winner, and how many plain steps the chosen form takes: guesses are worth it where a step brings more tokens.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from variants import fields, verdict

from lowlat.bench.arms.base import StepCase
from lowlat.bench.arms.general import GeneralArm
from lowlat.bench.presets import any_shape
from lowlat.bench.results import Simulated, default_directory, new_result, row_from_interval, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat.engine import row_kernels

FORMS: dict[str, bool | None] = {"general": None, "general older": False, "general rows": True}
"""Whether attention of several rows has kernels of its own; None: as the start finds."""


@contextmanager
def forced(row_attention: bool | None) -> Iterator[None]:
    """Inside, engines start with this attention."""
    choose = row_kernels.choose_row_kernels

    def chosen(model: Any, ops: Any, width: int) -> None:
        choose(model, ops, width)
        if row_attention is not None:
            ops.row_attention = row_attention

    row_kernels.choose_row_kernels = chosen
    try:
        yield
    finally:
        row_kernels.choose_row_kernels = choose


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
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    shape = any_shape(got.model)
    common: dict[str, Any] = {
        "shape": shape, "context": got.context, "device": "cuda", "model": got.model, "steps": got.steps,
    }  # fmt: skip
    engines = {}
    for name, row_attention in FORMS.items():
        with forced(row_attention):
            engines[name] = GeneralArm(StepCase(**common, spec=got.spec, draft=got.draft))
    engines["plain"] = GeneralArm(StepCase(**common))
    arms: dict[str, Callable[[], list[float]]] = {name: engine.measure for name, engine in engines.items()}
    measured = alternate(arms, got.rounds)
    for name, error in measured.errors.items():
        print(f"   {name} broke and is left out: {error}", flush=True)
    result = new_result("verify-step", simulated=Simulated(weights=False, acceptance=True), gpus=1)
    where = {"context": got.context, "dtype": "bfloat16", "concurrency": 1, "metric": "step_us"}
    for name in measured.rounds:
        draft = {} if name == "plain" else {"draft": got.spec}
        workload = f"{shape.name}, plain" if name == "plain" else f"{shape.name}, {got.spec}"
        about = fields("general" if name == "plain" else name)
        row = row_from_samples(
            measured.samples(name), workload=workload, note=engines[name].note, **where, **draft, **about
        )
        result.rows.append(row)
        print(f"{name:16} {row.median:8.1f} us [{row.low:.1f}, {row.high:.1f}]", flush=True)
    samples = {name: measured.samples(name) for name in measured.rounds}
    print(verdict(samples, "general"))
    if {"general", "plain"} <= set(samples):
        ratio = measured.ratio("general", "plain")
        print(f"   a step with guesses takes {ratio.value:.3f} plain ones [{ratio.low:.3f}, {ratio.high:.3f}]")
        steps = measured.ratio("plain", "general")
        over = {"workload": f"{shape.name}, {got.spec} over plain, steps", "context": got.context, "dtype": "bfloat16"}
        result.rows.append(row_from_interval(steps, arm="general", metric="speedup", draft=got.spec, **over))
    path = save(result, got.results or default_directory())
    print(path)
    return path


if __name__ == "__main__":
    main()
