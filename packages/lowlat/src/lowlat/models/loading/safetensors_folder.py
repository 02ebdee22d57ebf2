"""The weights of a Hugging Face style folder, read lazily from its safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat.models.loading.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LONGEST_HEADER = 100_000_000  # the format's own limit
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFolder:
    """Named weights in one safetensors file, or in shards with an index.

    Opening reads the files' headers only; tensors are read from a memory map when asked for. With `tied_head` a
    missing `lm_head.weight` is the embedding.
    """

    def __init__(self, folder: Path, *, tied_head: bool) -> None:
        """Raises CheckpointError for missing, damaged or pickled weights."""
        self.folder = folder
        self._entries: dict[str, tuple[Path, tuple[int, ...]]] = {}
        self.files = _files(folder)
        for path in self.files:
            for name, shape in _read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(f"weight {name!r} is in two files: {self._entries[name][0]} and {path}")
                self._entries[name] = (path, shape)
        self._alias = {_HEAD: _EMBEDDING} if tied_head and _EMBEDDING in self._entries else {}
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """Stored weights, sorted; an alias (a tied head) is not one."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._alias

    def _entry(self, name: str) -> tuple[str, Path, tuple[int, ...]]:
        # A tied model uses its embedding even when a copy of the head is stored.
        stored = self._alias.get(name, name)
        if stored not in self._entries:
            raise CheckpointError(f"the weight {name!r} is missing in {self.folder}")
        return stored, *self._entries[stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError when there is no such weight."""
        return self._entry(name)[2]

    def tensor(
        self, name: str, dtype: torch.dtype | None, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """A copy of a weight on the CPU, or of a part of its first and second dimension.

        Args:
            name: the weight.
            dtype: of the result; None: as stored.
            rows, columns: parts to read; only they are read from disk. A vector has rows alone.

        Raises:
            CheckpointError: no such weight, columns of a vector, or a damaged file.
        """
        import safetensors

        stored, path, shape = self._entry(name)
        if columns is not None and len(shape) < 2:
            raise CheckpointError(f"columns of {name!r} were asked for, but its shape is {shape}")
        try:
            if path not in self._open:
                self._open[path] = safetensors.safe_open(str(path), framework="pt")
            file = self._open[path]
            if rows is None and columns is None:
                tensor: torch.Tensor = file.get_tensor(stored)
            elif columns is None:
                tensor = file.get_slice(stored)[rows]
            else:
                tensor = file.get_slice(stored)[rows or slice(None), columns]
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        # A copy also when nothing changes: memory-mapped pages must not follow a file that is replaced.
        return tensor.to(dtype, copy=True).contiguous() if dtype is not None else tensor.clone().contiguous()


def _files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        return _shards(index)
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise CheckpointError(f"{folder} has {len(others)} safetensors files, but no {INDEX} that joins them")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as pickles ({pickles[0]}); lowlat reads safetensors alone, since opening a "
            "pickle can run code. If you trust the files, convert them once with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER, safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable index of shards: {error!r}") from error
    if outside := [name for name in names if Path(name).name != name or name in ("", ".", "..")]:
        raise CheckpointError(f"{index} names files outside its folder: {outside[0]!r}")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{len(missing)} of {len(names)} shards are missing in {index.parent}: {missing[0]} ...")
    return [index.parent / name for name in names]


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in one file, checked against its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise CheckpointError(f"{path} is not a whole safetensors file: its header would be {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise CheckpointError(
                f"{path} has {size} bytes instead of {8 + length + end}: it was cut short (download it again)"
            )
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error!r}") from error
