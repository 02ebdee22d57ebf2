"""What `lowlat bench step` is asked to measure, and what makes no sense of it: refused before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from lowlat.bench.arms.base import check_arm, check_model
from lowlat.bench.presets import DenseShape, FolderShape
from lowlat.bench.roofline import DTYPE_BYTES

MOST_STEPS = 60
"""In one measurement: the context grows by one token with each."""
LEAST_CEILING_GB = 0.001


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
    if options.ceiling_gb is not None and not LEAST_CEILING_GB <= options.ceiling_gb < math.inf:
        raise ValueError(f"--ceiling-gb must be a number from {LEAST_CEILING_GB:g}")
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
    if options.steps > MOST_STEPS:
        raise ValueError(f"at most {MOST_STEPS} steps in a measurement: the context grows by one token with each")
