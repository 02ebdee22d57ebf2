"""What the bench commands share: progress, errors in one line, and how a result is shown and saved."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import typer

from lowlat.bench.report import result_section
from lowlat.bench.results import Result, check, default_directory, save

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON (the format of docs/benchmarks.md).")]
Save = Annotated[
    bool, typer.Option("--save", help="Write the result to benchmarks/results, or to the folder of --results.")
]
Folder = Annotated[
    pathlib.Path | None,
    typer.Option("--results", help="Folder of results; default: benchmarks/results of the checkout."),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", help="What the server runs: `real` or `random` weights. Needed to save or print JSON."),
]


def say(text: str) -> None:
    """Progress, on standard error: one line that is drawn over on a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def counter(what: str) -> Callable[[int, int], None]:
    """Progress of (done, total): at most about twenty lines where standard error is no terminal."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total or done % max(1, total // 20) == 0:
            say(f"{what}: {done} of {total}")

    return show


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """One line for what the user can mend, and exit code 1; LOWLAT_DEBUG=1 shows the traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        end_progress()
        if os.environ.get("LOWLAT_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Positive whole numbers joined by commas. Raises ValueError naming the option."""
    try:
        found = tuple(int(part) for part in text.split(","))
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


class Keeper:
    """Writes a result that grows, where that was asked for, each time in the place of what it wrote before: an end by
    force loses the last part alone."""

    def __init__(self, wanted: bool, folder: pathlib.Path | None) -> None:
        self._wanted = wanted
        self._folder = folder or default_directory()
        self.path: pathlib.Path | None = None

    def __call__(self, result: Result) -> None:
        """Write the result as it is now."""
        if not self._wanted:
            return
        self.path = save(result, self._folder, over=self.path)


def finish(result: Result, *, as_json: bool, kept: Keeper, weights_said: bool = True) -> None:
    """Show a result on standard output and say where it was written; tables tell of weights what was said."""
    end_progress()
    if kept.path is not None:
        print(f"wrote {kept.path}", file=sys.stderr)
    elif as_json:
        check(result)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    else:
        print(result_section(result, weights_said=weights_said))
