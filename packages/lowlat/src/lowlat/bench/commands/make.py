"""`lowlat bench make-model`."""

from __future__ import annotations

import pathlib
import sys
from typing import Annotated

import typer

from lowlat.bench.commands.common import plain_errors
from lowlat.bench.progress import counter, end_progress, say

EPILOG = """
Examples:

  lowlat bench make-model llama-1b /tmp/llama-1b             a Llama-3.2-1B shape to serve, 2.5 GB

  lowlat bench make-model smollm2 /tmp/long --layers 4 --max-context 262144   small, for long contexts

  lowlat bench make-model deepseek-v41 /tmp/v41 --layers 1      10 GB, to measure with step --random-folder

  lowlat bench make-model benchmarks/configs/qwen3-30b-a3b /tmp/moe --layers 2     experts: transformers draws them

Serve it with `lowlat serve --model FOLDER`, and say --weights random when you measure it.
"""


def _make_v41(model: str, folder: pathlib.Path, layers: int | None, seed: int) -> None:
    """A DeepSeek-V4.1 in its stored formats; with fewer layers it has no draft."""
    from lowlat.bench.random_v41 import first_layers
    from lowlat.models.deepseek_v4.make_checkpoint import MakeCheckpointError, make_checkpoint

    done = 0

    def show(written: int, total: int) -> None:
        nonlocal done
        if written * 20 // total > done:
            done = written * 20 // total
            say(f"{written / 1e9:.1f} of {total / 1e9:.1f} GB")

    try:
        make_checkpoint(first_layers(model, layers, draft=layers is None), folder, seed=seed, progress=show)
    except MakeCheckpointError as error:
        raise ValueError(str(error)) from error
    end_progress()
    print(f"wrote {folder}", file=sys.stderr)


def make_model(
    model: Annotated[str, typer.Argument(help="Preset, or a folder with a config.json.")],
    folder: Annotated[pathlib.Path, typer.Argument(help="New folder to write.")],
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Keep only so many layers.")] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=1, help="Longest context; default: the shape's own.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "bfloat16",
    tokenizer: Annotated[
        pathlib.Path | None,
        typer.Option("--tokenizer", help="Folder with a tokenizer.json; default: the embedded model's."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the weights.")] = 0,
    device: Annotated[
        str, typer.Option("--device", help="Where weights are drawn: cpu, or cuda, which is faster and draws others.")
    ] = "cpu",
) -> None:
    """Write a model folder with random weights, to measure an architecture whose weights are not at hand."""
    with plain_errors():
        from lowlat.bench.presets import PRESETS, V41_NAMES, FolderShape, any_shape, find_shape
        from lowlat.bench.random_model import make_family_folder, make_folder
        from lowlat.bench.roofline import DTYPE_BYTES
        from lowlat.models.loading.checkpoint import open_checkpoint

        if dtype not in DTYPE_BYTES:
            raise ValueError(f"--dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if model in V41_NAMES:
            _make_v41(model, folder, layers, seed)
            return
        words = tokenizer or open_checkpoint("smollm2").folder
        if device not in ("cpu", "cuda"):
            raise ValueError(f"--device {device!r} is neither cpu nor cuda")
        shape = any_shape(model, layers if model in PRESETS else None)
        if isinstance(shape, FolderShape):
            make_family_folder(
                pathlib.Path(model), folder, words, layers=layers, dtype=dtype, max_context=max_context, seed=seed,
                device=device,
            )  # fmt: skip
            print(f"wrote {folder}", file=sys.stderr)
            return
        shape = find_shape(model, layers)
        make_folder(
            shape, folder, words, dtype=dtype, max_context=max_context, seed=seed, device=device,
            progress=counter("weights"),
        )  # fmt: skip
        end_progress()
        print(f"wrote {folder}", file=sys.stderr)
