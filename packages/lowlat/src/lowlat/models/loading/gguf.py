"""A reader of GGUF files: metadata parsed in one pass, tensors read from a memory map when asked for.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Files are not trusted: every count and offset is checked against the file's size before anything is allocated.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.ggml_types import GGML_TYPES, GGMLType

_MAGIC = b"GGUF"
_MOST_DIMENSIONS = 4
_MOST_NESTING = 4
_LONGEST_NAME = 65_535
_DEFAULT_ALIGNMENT = 32

# Metadata value types: 0-7 and 10-12 are numbers, 8 a string, 9 an array.
_NUMBER_TYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFError(CheckpointError):
    """The file is damaged, cut short, hostile or of an unsupported kind; the message says which and where."""


class TensorInfo(NamedTuple):
    """One tensor of the file. `shape` is in torch's order, rows first: the reverse of the file's own."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    size: int
    """Bytes of the tensor's data."""


class RawTensor(NamedTuple):
    """A tensor as it lies in the file: blocks along the last dimension."""

    type: GGMLType
    shape: tuple[int, ...]
    blocks: np.ndarray[Any, np.dtype[np.uint8]]
    """uint8 [rows, bytes of a row], read-only, a view of the memory map."""


class GGUFFile:
    """An open GGUF file.

    Attributes:
        metadata: every key with its value; arrays of numbers are numpy arrays, arrays of strings are lists.
        tensors: every tensor by its name in the file.
        version: the format's version, 2 or 3.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads everything but the tensors' data.

        Raises:
            GGUFError: the file cannot be opened or is not a sound GGUF file.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise GGUFError(f"{self.path} cannot be read as a GGUF file: {error}") from error
        reader = _Reader(self._map, self.path)
        self.version, tensor_count, key_count = reader.header()
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.name("metadata key")
            if key in self.metadata:
                raise reader.error(f"metadata key {key!r} appears twice")
            self.metadata[key] = reader.value(reader.u32(), key)
        infos = [reader.tensor_info() for _ in range(tensor_count)]
        self.header_size = reader.position
        """Bytes of the header, metadata and list of tensors: all that describes the file."""
        self.tensors = self._place(infos, self._alignment(reader), reader)

    def _alignment(self, reader: _Reader) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
            raise reader.error(f"general.alignment is {alignment!r}, which is not a power of two up to 1 MiB")
        return alignment

    def _place(self, infos: list[TensorInfo], alignment: int, reader: _Reader) -> dict[str, TensorInfo]:
        """Turns offsets in the data section into offsets in the file, and checks that each tensor lies inside it."""
        start = -(-reader.position // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in placed:
                raise reader.error(f"tensor {info.name!r} appears twice")
            if info.offset % alignment:
                raise reader.error(f"tensor {info.name!r} starts at {info.offset}, not a multiple of {alignment}")
            offset = start + info.offset
            if offset + info.size > len(self._map):
                raise reader.error(
                    f"tensor {info.name!r} ends at byte {offset + info.size} of a file of {len(self._map)}: "
                    "the file was cut short (download it again) or is damaged"
                )
            placed[info.name] = info._replace(offset=offset)
        return placed

    def raw(self, name: str) -> RawTensor:
        """The tensor's blocks as they are, without a copy.

        Raises:
            KeyError: no such tensor.
        """
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        blocks = np.frombuffer(self._map, np.uint8, info.size, info.offset)
        return RawTensor(info.type, info.shape, blocks.reshape(rows, info.size // rows if rows else 0))

    def dequantize(
        self, name: str, rows: slice | np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor's values in float32.

        Args:
            name: the tensor's name in the file.
            rows: of a matrix, the rows to read, as a slice or as indices in the wanted order; None: all.

        Returns:
            float32 array of the tensor's shape (its first dimension that of `rows`).

        Raises:
            KeyError: no such tensor.
            GGUFError: its type is not supported.
        """
        raw = self.raw(name)
        if raw.type.to_float32 is None:
            known = ", ".join(sorted(kind.name for kind in GGML_TYPES.values() if kind.to_float32 is not None))
            raise GGUFError(
                f"tensor {name!r} in {self.path} is of type {raw.type.name}, which is not supported; "
                f"supported are {known}. Choose a file with one of those (Q8_0 is the closest to the original)."
            )
        if rows is None:
            return raw.type.to_float32(raw.blocks).reshape(raw.shape)
        if len(raw.shape) != 2:
            raise ValueError(f"rows of {name!r} were asked for, but its shape is {raw.shape}")
        return raw.type.to_float32(raw.blocks[rows]).reshape(-1, raw.shape[1])

    def header_bytes(self) -> bytes:
        """Everything before the tensors' data."""
        return self._map[: self.header_size]


class _Reader:
    """A position in the file's head; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self.position = 0

    def error(self, text: str) -> GGUFError:
        return GGUFError(f"{self._path}: {text}")

    def _take(self, size: int, what: str) -> int:
        """Moves past `size` bytes; returns where they start."""
        start = self.position
        if size > self._size - start:
            raise self.error(
                f"{what} at byte {start} needs {size} bytes, but only {self._size - start} are left: "
                "the file was cut short (download it again) or is damaged"
            )
        self.position = start + size
        return start

    def u32(self) -> int:
        number: int = _U32.unpack_from(self._data, self._take(4, "a number"))[0]
        return number

    def u64(self) -> int:
        number: int = _U64.unpack_from(self._data, self._take(8, "a number"))[0]
        return number

    def header(self) -> tuple[int, int, int]:
        """Version, number of tensors and number of metadata keys."""
        magic = self._data[: len(_MAGIC)]
        if magic != _MAGIC:
            raise self.error(f"not a GGUF file: it begins with {magic!r} instead of {_MAGIC!r}")
        self.position = len(_MAGIC)
        version = self.u32()
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (2, 3):
                raise self.error("a big-endian GGUF file; convert it with gguf-convert-endian FILE little")
            raise self.error(f"GGUF version {version} is not supported (2 and 3 are); convert the model again")
        tensors, keys = self.u64(), self.u64()
        left = self._size - self.position
        # The smallest key takes 13 bytes, the smallest tensor description 24.
        if keys > left // 13 or tensors > left // 24:
            raise self.error(f"{tensors} tensors and {keys} metadata keys cannot fit into {left} bytes")
        return version, tensors, keys

    def name(self, what: str) -> str:
        length = self.u64()
        if length > _LONGEST_NAME:
            raise self.error(f"{what} at byte {self.position} is {length} bytes long; {_LONGEST_NAME} are allowed")
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {start} is not UTF-8: {error}") from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _NUMBER_TYPES:
            dtype = _NUMBER_TYPES[kind]
            return np.frombuffer(self._data, dtype, 1, self._take(dtype.itemsize, f"value of {key!r}"))[0].item()
        if kind == _STRING:
            length = self.u64()
            start = self._take(length, f"value of {key!r}")
            return self._data[start : start + length].decode("utf-8", "replace")
        if kind != _ARRAY:
            raise self.error(f"value of {key!r} has the unknown type {kind}")
        if depth == _MOST_NESTING:
            raise self.error(f"arrays in {key!r} are nested deeper than {_MOST_NESTING}")
        item_kind, count = self.u32(), self.u64()
        if item_kind in _NUMBER_TYPES:
            dtype = _NUMBER_TYPES[item_kind]
            start = self._take(count * dtype.itemsize, f"array {key!r}")
            return np.frombuffer(self._data, dtype, count, start)
        least = 8 if item_kind == _STRING else 12
        if count > (self._size - self.position) // least:
            raise self.error(f"array {key!r} says it has {count} items, more than the rest of the file can hold")
        if item_kind == _STRING:
            return self._strings(count, key)
        return [self.value(item_kind, key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has 10^5 strings and more, so this loop does without a call for each."""
        data, size, position = self._data, self._size, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            if position + 8 > size:
                break
            end = position + 8 + unpack(data, position)[0]
            if end > size:
                break
            strings.append(data[position + 8 : end].decode("utf-8", "replace"))
            position = end
        if len(strings) < count:
            raise self.error(f"array {key!r} ends behind the file's end: the file was cut short or is damaged")
        self.position = position
        return strings

    def tensor_info(self) -> TensorInfo:
        """One entry of the list of tensors; its offset is still relative to the data section."""
        name = self.name("tensor name")
        dimensions = self.u32()
        if dimensions > _MOST_DIMENSIONS:
            raise self.error(f"tensor {name!r} has {dimensions} dimensions; {_MOST_DIMENSIONS} are allowed")
        shape = tuple(self.u64() for _ in range(dimensions))[::-1] or (1,)
        number, offset = self.u32(), self.u64()
        kind = GGML_TYPES.get(number)
        if kind is None:
            raise self.error(f"tensor {name!r} has the unknown type {number}")
        if 0 in shape:
            raise self.error(f"tensor {name!r} is empty: its shape is {shape}")
        if shape[-1] % kind.block_values:
            raise self.error(f"tensor {name!r} has rows of {shape[-1]}, not whole blocks of {kind.block_values}")
        # Python's integers do not overflow, so absurd dimensions simply exceed the file.
        size = math.prod(shape) // kind.block_values * kind.block_bytes
        if size > self._size or offset > self._size:
            raise self.error(f"tensor {name!r} of shape {shape} at {offset} needs more bytes than the file has")
        return TensorInfo(name, kind, shape, offset, size)
