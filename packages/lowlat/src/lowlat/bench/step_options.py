"""What `lowlat bench step` is asked to measure, and what makes no sense of it: refused before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lowlat.bench.arms.base import check_arm, check_model
from lowlat.bench.presets import DENSE_ARCHITECTURES, DenseShape, FolderShape, shape_from_config
from lowlat.bench.roofline import DTYPE_BYTES

MOST_STEPS = 60
"""In one measurement: the context grows by one token with each."""
LEAST_CEILING_GB, MOST_CEILING_GB = 0.001, 1000
MOST_THREADS = 1024
"""Many more end the process where PyTorch starts them."""


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


def check_weights(folder: str, shape: DenseShape | FolderShape, layers: int | None = None) -> None:
    """Raise ValueError where a folder (or `smollm2`) holds another model than `shape`, whose name results would give
    its times; of a model that is no dense decoder, vocabulary and `layers` are compared.
    """
    from lowlat.models.loading.checkpoint import open_checkpoint

    config = open_checkpoint(folder).config
    if isinstance(shape, DenseShape):
        architecture = str((config.get("architectures") or ["?"])[0])
        if architecture not in DENSE_ARCHITECTURES:
            raise ValueError(f"--model-folder {folder} holds a {architecture}, which is no {shape.name}")
        held = shape_from_config(config, shape.name)
        compared = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "qk_norm")
        pairs = {name: (getattr(held, name), getattr(shape, name)) for name in compared}
    else:
        text = config.get("text_config") or config
        pairs = {"vocab": (text.get("vocab_size"), shape.vocab)}
        if layers is not None:
            pairs["layers"] = (text.get("num_hidden_layers"), layers)
    found = [f"{name} {has} instead of {wanted}" for name, (has, wanted) in pairs.items() if has != wanted]
    if found:
        raise ValueError(
            f"--model-folder {folder} is no {shape.name}: {', '.join(found)}. Name its own shape with --model "
            "(the folder itself, say); --layers cuts random weights alone"
        )


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
    if options.ceiling_gb is not None and not LEAST_CEILING_GB <= options.ceiling_gb <= MOST_CEILING_GB:
        raise ValueError(f"--ceiling-gb must be a number from {LEAST_CEILING_GB:g} to {MOST_CEILING_GB}")
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
