"""`lowlat models`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

if TYPE_CHECKING:
    from lowlat.models.loading.registry import ModelEntry

EPILOG = """
--model takes a name of this list, a Hugging Face style folder (config.json, tokenizer.json, *.safetensors), or a .gguf
file, which is converted once into the cache ($LOWLAT_CACHE, else ~/.cache/lowlat). Nothing is downloaded.
"""

_UNFOLDED = 10_000  # columns


def models(
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list: name, kind, available, path, bytes, description.")
    ] = False,
) -> None:
    """List what --model accepts by name, and the GGUF files converted before."""
    from lowlat.models.loading.registry import list_models

    entries = list_models()
    if json:
        print(msgspec.json.encode(entries).decode())
        return
    _print_table(entries)


def _print_table(entries: list[ModelEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("MODEL", "KIND", "HERE", "SIZE", "WHAT"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        size = f"{entry.bytes / 2**20:,.0f} MiB" if entry.available else ""
        table.add_row(entry.name, entry.kind, "yes" if entry.available else "no", size, entry.description)
    # Behind a pipe nothing is folded: a path must stay in one piece.
    console = Console(width=None if sys.stdout.isatty() else _UNFOLDED)
    console.print(table)
    console.print("Any folder with config.json and *.safetensors, and any .gguf file, can be given by its path.")
