"""Memory that every rank of a node maps: each rank fills a part, all ranks read all parts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lowlat.parallel.group import Communicator

_SHARED_MEMORY = "/dev/shm"
_LONGEST_NAME = 256


def share_parts(
    communicator: Communicator, rows: int, row_bytes: int, fill: Callable[[torch.Tensor], object]
) -> list[torch.Tensor]:
    """Every rank's part, uint8 [rows of that rank, row_bytes]; read-only by agreement (torch has no such tensors).

    Args:
        communicator: ranks of one node; all of them call this together.
        rows: rows of this rank's part.
        fill: called with this rank's part, to write it.

    The memory has no name any more when this returns, so it is freed with the last rank, however that ends.

    Raises:
        OSError: shared memory has too little room.
    """
    rank, size = communicator.shard.rank, communicator.shard.size
    folder = Path(_agree_on_folder(communicator))
    try:
        _fill_part(folder / str(rank), rows, row_bytes, fill)
        communicator.all_reduce(torch.ones(1))  # all parts are there
        parts = [_map(folder / str(other), row_bytes) for other in range(size)]
        communicator.all_reduce(torch.ones(1))  # and all are mapped
        return parts
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _agree_on_folder(communicator: Communicator) -> str:
    name = torch.zeros(_LONGEST_NAME, dtype=torch.uint8)
    if communicator.shard.rank == 0:
        memory = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
        encoded = tempfile.mkdtemp(prefix="lowlat-parts-", dir=memory).encode()
        name[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    return bytes(communicator.broadcast(name).tolist()).rstrip(b"\0").decode()


def _fill_part(path: Path, rows: int, row_bytes: int, fill: Callable[[torch.Tensor], object]) -> None:
    size = rows * row_bytes
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise OSError(f"{path.parent} has {free / 1e9:.1f} GB free, but a rank's part needs {size / 1e9:.1f} GB")
    with path.open("wb") as file:
        file.truncate(size)
    fill(_map(path, row_bytes))


def _map(path: Path, row_bytes: int) -> torch.Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(-1, row_bytes)
