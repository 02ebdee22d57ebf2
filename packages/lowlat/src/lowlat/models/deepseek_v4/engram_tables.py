"""Where Engram tables lie, and how their rows are read: three placements with the same bytes.

Legend of shape suffixes: R rows, C columns of the table set (n-gram size and head), B bytes of a table row (values,
then scales).

`shards`: each rank holds its columns and an all-reduce joins them; `peer`: each rank holds its columns in memory that
every rank of the node maps; `host`: one copy in host memory for the whole node, here the checkpoint's own file mapped
read-only, so that it takes no loading and the ranks share its pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
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
_CHUNK_ROWS = 1 << 20


class EngramTable(Protocol):
    """Looks up rows."""

    def rows(self, ids_RC: torch.Tensor) -> torch.Tensor:
        """Bytes [R, C, B] of the table rows `ids_RC`; the same on every rank."""


def choose_placement(
    wanted: Literal["auto", "shards", "peer", "host"], table_bytes: int, ranks: int, device_bytes_free: int
) -> Placement:
    """`wanted`, or for `auto` shards where a rank's part fits into its free device memory, else the host's copy."""
    if wanted != "auto":
        return wanted
    return "shards" if -(-table_bytes // ranks) <= device_bytes_free else "host"


def column_part(constants: EngramHash, shard: Shard) -> tuple[slice, slice]:
    """A rank's columns, and the table rows that belong to them."""
    columns = shard.part(len(constants.primes))
    starts = [*constants.offsets, constants.rows]
    return columns, slice(starts[columns.start], starts[columns.stop])


def read_part(weights: Weights, name: str, rows: slice) -> torch.Tensor:
    """Bytes [rows, B] of a part of a stored table, read a piece at a time."""
    first = weights.raw(f"{name}.weight", rows=slice(0, 1)).shape[1]
    scales = weights.raw(f"{name}.scale", rows=slice(0, 1)).shape[1]
    part = torch.empty(rows.stop - rows.start, first + scales, dtype=torch.uint8)
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
        self._all_reduce = communicator.all_reduce

    def rows(self, ids_RC: torch.Tensor) -> torch.Tensor:
        """Bytes [R, C, B]."""
        out = torch.zeros(*ids_RC.shape, self.part_XB.shape[1], dtype=torch.uint8)
        out[:, self.columns] = self.part_XB[ids_RC[:, self.columns] - self.table_rows.start]
        return self._all_reduce(out)


class PeerTable:
    """All ranks' parts, mapped into every rank: each looks up all columns itself, wherever they lie."""

    def __init__(self, parts_XB: Sequence[torch.Tensor], constants: EngramHash) -> None:
        self.parts_XB = parts_XB
        self._columns = [column_part(constants, Shard(rank, len(parts_XB))) for rank in range(len(parts_XB))]

    def rows(self, ids_RC: torch.Tensor) -> torch.Tensor:
        """Bytes [R, C, B]."""
        found = [
            part[ids_RC[:, columns] - table_rows.start]
            for part, (columns, table_rows) in zip(self.parts_XB, self._columns, strict=True)
        ]
        return torch.cat(found, 1)

    @staticmethod
    def publish(part_XB: torch.Tensor, path: Path) -> None:
        """Put a rank's part where peers can map it: a file in shared memory."""
        part_XB.numpy().tofile(path)

    @staticmethod
    def map_part(path: Path, row_bytes: int) -> torch.Tensor:
        """Map a published part, read-only by agreement (torch has no read-only tensors)."""
        size = path.stat().st_size
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return flat.view(-1, row_bytes)


class HostTable:
    """One copy for all ranks of a node: the checkpoint's file, mapped read-only."""

    def __init__(self, values: np.ndarray, scales: np.ndarray) -> None:
        self._values, self._scales = values, scales

    @classmethod
    def open(cls, weights: Weights, name: str) -> HostTable:
        """Map a stored table. Raises `CheckpointError` when it is missing."""
        return cls(*(_map(weights, f"{name}.{part}") for part in ("weight", "scale")))

    def rows(self, ids_RC: torch.Tensor) -> torch.Tensor:
        """Bytes [R, C, B]."""
        ids = ids_RC.numpy()
        return torch.from_numpy(np.concatenate([self._values[ids], self._scales[ids]], -1))


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
