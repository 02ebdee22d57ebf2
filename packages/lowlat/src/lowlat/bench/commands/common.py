"""What the bench commands share: options of results, checks of values, errors in one line."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from lowlat.bench.progress import end_progress
from lowlat.bench.results import check_folder
from lowlat.cli.errors import own_words

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON (the format of docs/benchmarks.md).")]
Save = Annotated[
    bool,
    typer.Option(
        "--save",
        help="Write the result to benchmarks/results, or to the folder of --results; a second run of a day gets -2 "
        "before .json, so nothing is overwritten. A run that ends early leaves what it measured, marked incomplete.",
    ),
]
Folder = Annotated[
    pathlib.Path | None,
    typer.Option("--results", help="Folder of results; default: benchmarks/results of the checkout."),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help="What the server runs: `real` or `random` weights. Needed to save or print JSON."),
]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """One line for what the user can mend, and exit code 1; LOWLAT_DEBUG=1 shows the traceback."""
    try:
        yield
    except typer.Exit:  # a RuntimeError, but no error: a command has said what it found
        raise
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        end_progress()
        if os.environ.get("LOWLAT_DEBUG"):
            raise
        print(f"error: {own_words(error)}", file=sys.stderr)
        raise typer.Exit(1) from error


def check_output(path: pathlib.Path | None, option: str) -> None:
    """Raise ValueError where a file of an option cannot be written, before anything is measured."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: name a file")
    try:
        check_folder(path.parent)
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from error


def finite(value: float | None) -> float | None:
    """For an option of any range: refuse nan, which no range refuses, and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Positive whole numbers joined by commas, each once. Raises ValueError naming the option."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{name} {text!r}: write positive whole numbers joined by commas, such as 1,4,8")
    return found


def random_weights(weights: str | None, *, needed: bool) -> bool:
    """Whether the weights are simulated. Raises ValueError where a result needs the answer and has none."""
    if weights not in (None, "real", "random"):
        raise ValueError(f"--weights {weights!r} is neither real nor random")
    if weights is None and needed:
        raise ValueError("a result must say what the weights were: add --weights real or --weights random")
    return weights == "random"
