"""Writes safetensors shards as a stream: a shard's header first, then the bytes of one tensor after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lowlat.models.deepseek_v4.names import TensorSpec

Pieces = Callable[[TensorSpec], Iterable[bytes]]
Progress = Callable[[int, int], None]


def plan_shards(tensors: list[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut the list, in order, into shards of at most `shard_bytes` (a larger tensor gets one of its own)."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.bytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.bytes
    return shards


def write_shards(folder: Path, shards: list[list[TensorSpec]], pieces: Pieces, progress: Progress) -> list[Path]:
    """Write all shards and their index.

    Raises:
        ValueError: `pieces` gave more or fewer bytes than a tensor has.
        OSError: the disk is full or not writable.
    """
    total = sum(tensor.bytes for shard in shards for tensor in shard)
    done = 0
    paths, places = [], {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with path.open("wb") as file:
            file.write(_header(shard))
            for tensor in shard:
                for piece in _checked(tensor, pieces(tensor)):
                    file.write(piece)
                    done += len(piece)
                    progress(done, total)
                places[tensor.name] = path.name
        paths.append(path)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return paths


def _header(shard: list[TensorSpec]) -> bytes:
    entries, offset = {}, 0
    for tensor in shard:
        end = offset + tensor.bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checked(tensor: TensorSpec, pieces: Iterable[bytes]) -> Iterator[bytes]:
    written = 0
    for piece in pieces:
        written += len(piece)
        yield piece
    if written != tensor.bytes:
        raise ValueError(f"{tensor.name}: {written} bytes instead of {tensor.bytes}")
