"""Just enough of the GGUF file format (version 3) to find tensors in it, and to write small files for tests.

The file is mapped, not read: arrays of strings, which are most of the metadata, are skipped over without decoding.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK = 32
BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is not a GGUF file this reader understands; the text says where it stopped."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is. `shape` is (rows, columns), or (n,) for a vector; `kind` is GGUF's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def nbytes(self) -> int:
        count = int(np.prod(self.shape))
        return 4 * count if self.kind == F32 else count // BLOCK * BLOCK_BYTES[self.kind]


class GGUFFile:
    """A mapped file. Raises GGUFError for a file that is damaged or of another format."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read_header(path)
        except struct.error as error:
            raise GGUFError(f"{path}: the header ends in the middle of a value ({error})") from error

    def _read_header(self, path: Path) -> None:
        magic, version, tensors, fields = self._unpack("4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise GGUFError(f"{path}: not a GGUF file of version 3 (found {magic!r}, {version})")
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I")[0])
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = self._string()
            shape = self._unpack(f"{self._unpack('I')[0]}Q")
            kind, offset = self._unpack("IQ")
            self.tensors[name] = TensorInfo(name, tuple(reversed(shape)), kind, offset)
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes as they lie in the file, uint8, without a copy. Raises GGUFError if they are cut off."""
        info = self.tensors[name]
        start = self._data + info.offset
        if start + info.nbytes > len(self._map):
            raise GGUFError(f"{name} ends after the end of the file")
        return np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=start)

    def vector(self, name: str) -> np.ndarray:
        """A float32 tensor. Raises GGUFError for another type."""
        if self.tensors[name].kind != F32:
            raise GGUFError(f"{name} is of type {self.tensors[name].kind}, not F32")
        return self.raw(name).view(np.float32)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._map, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return self._map[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise GGUFError(f"unknown metadata type {kind}")
        return self._unpack(_SCALARS[kind])[0]

    def _array(self) -> int:
        """Skip an array, return its length: nothing here needs the entries."""
        kind, count = self._unpack("IQ")
        if kind == _STRING:
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", self._map, self._at)
                self._at += 8 + length
        elif kind in _SCALARS:
            self._at += count * struct.calcsize("<" + _SCALARS[kind])
        else:
            raise GGUFError(f"arrays of metadata type {kind} are not understood")
        return int(count)


def write(
    path: Path, metadata: dict[str, str | int | float], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]
) -> None:
    """Write a GGUF file of scalars and tensors (kind, shape, bytes)."""
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key)
        if isinstance(value, str):
            head += struct.pack("<I", _STRING) + _text(value)
        else:
            head += struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)
    body = bytearray()
    for name, (kind, shape, data) in tensors.items():
        body += bytes(-len(body) % 32)
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += data
    path.write_bytes(bytes(head) + bytes(-len(head) % 32) + bytes(body))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def dequantise(raw: np.ndarray, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks to float32, the plain way: Q4_1 is q * d + m, Q8_0 is q * d. Shape (rows, columns)."""
    if kind == F32:
        return raw.view(np.float32).reshape(shape)
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(shape)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 4:]
    quants = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return (quants * scale + least).reshape(shape)
