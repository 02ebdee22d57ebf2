"""Where Engram tables lie, and how their rows are read: three placements with the same bytes.

Legend of shape suffixes: R rows, C columns of the table set (n-gram size and head), B bytes of a table row (values,
then scales).

`shards`: each rank holds its columns and an all-reduce joins them; `peer`: each rank holds its columns in memory that
every rank of the node maps; `host`: one copy in host memory for the whole node, here the checkpoint's own file mapped
read-only, so that it takes no loading and the ranks share its pages.

A look-up is started as soon as a step's tokens are known, and runs beside the layers before the one that needs it: the
all-reduce of `shards` in the group's threads, the reads of `peer` and `host`, which may wait for a disk, in `reader`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from lowlat.layers.engram import EngramHash
from lowlat.models.loading.errors import CheckpointError
from lowlat.parallel.group import Communicator
from lowlat.parallel.shard import Shard

if TYPE_CHECKING:
    from lowlat.models.deepseek_v4.weights import Weights

Placement = Literal["shards", "peer", "host"]
WantedPlacement = Literal["auto", "shards", "peer", "host"]
LookUp = Callable[[], torch.Tensor]
"""A look-up that was started; calling it waits for its bytes [R, C, B]."""
_CHUNK_ROWS = 1 << 20


class EngramTable(Protocol):
    """Looks up rows."""

    def start(self, ids_RC: torch.Tensor) -> LookUp:
        """Begin to read the table rows `ids_RC`; the bytes are the same on every rank."""


def choose_placement(wanted: WantedPlacement, table_bytes: int, ranks: int, device_bytes_free: int) -> Placement:
    """`wanted`, or for `auto` shards where a rank's part fits into its free device memory, else the host's copy."""
    if wanted != "auto":
        return wanted
    return "shards" if -(-table_bytes // ranks) <= device_bytes_free else "host"


def column_part(constants: EngramHash, shard: Shard) -> tuple[slice, slice]:
    """A rank's columns, and the table rows that belong to them."""
    columns = shard.part(len(constants.primes))
    starts = [*constants.offsets, constants.rows]
    return columns, slice(starts[columns.start], starts[columns.stop])


def row_bytes(weights: Weights, name: str) -> int:
    """Bytes of one row of a stored table: values, then scales."""
    return sum(weights.checkpoint.shape(weights.stored_name(f"{name}.{part}"))[1] for part in ("weight", "scale"))


def read_part(weights: Weights, name: str, rows: slice, part: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes [rows, B] of a part of a stored table, read a piece at a time (into `part` where it is given)."""
    if part is None:
        part = torch.empty(rows.stop - rows.start, row_bytes(weights, name), dtype=torch.uint8)
    first = weights.checkpoint.shape(weights.stored_name(f"{name}.weight"))[1]
    for start in range(rows.start, rows.stop, _CHUNK_ROWS):
        piece = slice(start, min(rows.stop, start + _CHUNK_ROWS))
        at = slice(piece.start - rows.start, piece.stop - rows.start)
        part[at, :first] = weights.raw(f"{name}.weight", rows=piece).view(torch.uint8)
        part[at, first:] = weights.raw(f"{name}.scale", rows=piece).view(torch.uint8)
    return part


class ShardedTable:
    """This rank's columns in its own memory. Ranks add up their bytes, zeros where a column is another rank's."""

    def __init__(self, part_XB: torch.Tensor, constants: EngramHash, communicator: Communicator) -> None:
        self.part_XB = part_XB
        self.columns, self.table_rows = column_part(constants, communicator.shard)
        self._start_all_reduce = communicator.start_all_reduce

    def start(self, ids_RC: torch.Tensor) -> LookUp:
        """Read this rank's columns and begin the all-reduce."""
        out = torch.zeros(*ids_RC.shape, self.part_XB.shape[1], dtype=torch.uint8)
        out[:, self.columns] = self.part_XB[ids_RC[:, self.columns] - self.table_rows.start]
        return self._start_all_reduce(out)


class PeerTable:
    """All ranks' parts, mapped into every rank: each looks up all columns itself, wherever they lie."""

    def __init__(self, parts_XB: Sequence[torch.Tensor], constants: EngramHash, reader: Executor) -> None:
        self.parts_XB, self._reader = parts_XB, reader
        self._columns = [column_part(constants, Shard(rank, len(parts_XB))) for rank in range(len(parts_XB))]

    def start(self, ids_RC: torch.Tensor) -> LookUp:
        """Begin to read from all parts."""
        return self._reader.submit(self._read, ids_RC).result

    def _read(self, ids_RC: torch.Tensor) -> torch.Tensor:
        found = [
            part[ids_RC[:, columns] - table_rows.start]
            for part, (columns, table_rows) in zip(self.parts_XB, self._columns, strict=True)
        ]
        return torch.cat(found, 1)


class HostTable:
    """One copy for all ranks of a node: the checkpoint's file, mapped read-only."""

    def __init__(self, values: np.ndarray, scales: np.ndarray, reader: Executor) -> None:
        self._reader = reader
        with warnings.catch_warnings():
            # torch has no read-only tensors; nothing here writes these, and a write would fail.
            warnings.filterwarnings("ignore", message=".*not writable")
            self._values, self._scales = torch.from_numpy(values), torch.from_numpy(scales)

    @classmethod
    def open(cls, weights: Weights, name: str, reader: Executor) -> HostTable:
        """Map a stored table. Raises `CheckpointError` when it is missing."""
        return cls(_map(weights, f"{name}.weight"), _map(weights, f"{name}.scale"), reader)

    def start(self, ids_RC: torch.Tensor) -> LookUp:
        """Begin to read from the file."""
        return self._reader.submit(self._read, ids_RC).result

    def _read(self, ids_RC: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._values[ids_RC], self._scales[ids_RC]], -1)


def _map(weights: Weights, name: str) -> np.ndarray:
    """A stored tensor of one-byte values as a memory map of its file."""
    stored = weights.stored_name(name)
    folder = weights.checkpoint.folder
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = [folder / places[stored]] if stored in places else []
    else:
        paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length)).get(stored)
        if entry is not None:
            start = 8 + length + entry["data_offsets"][0]
            return np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=tuple(entry["shape"]))
    raise CheckpointError(f"the weight {stored!r} is missing in {folder}")
