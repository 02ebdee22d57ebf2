"""Reads a published-format checkpoint into float64 arrays, without the package under test."""

from __future__ import annotations

import json
from pathlib import Path

import dsv4_formats as formats
import numpy as np

_TYPES = {
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
    "BF16": np.uint16,
    "F32": np.float32,
    "I64": np.int64,
}


def read_raw(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type name and stored array of every tensor."""
    result = {}
    for path in sorted(folder.glob("model*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            array = np.frombuffer(data[begin:end], dtype=_TYPES[entry["dtype"]]).reshape(entry["shape"])
            result[name.removeprefix("model.")] = (entry["dtype"], array)
    return result


def read_weights(folder: Path, block: int) -> dict[str, np.ndarray]:
    """Dequantised weights by name."""
    raw = read_raw(folder)
    return {
        name: _dequantise(name, kind, array, raw, block) for name, (kind, array) in raw.items() if kind != "F8_E8M0"
    }


def _dequantise(name: str, kind: str, array: np.ndarray, raw: dict, block: int) -> np.ndarray:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind in ("F32", "I64"):
        return array.astype(np.float64) if kind == "F32" else array
    scale = 2.0 ** (raw[name.removesuffix(".weight") + ".scale"][1].astype(np.float64) - 127)
    if kind == "I8":
        values = np.empty((len(array), 2 * array.shape[1]))
        values[:, 0::2] = formats.E2M1[array & 15]
        values[:, 1::2] = formats.E2M1[array >> 4]
        return values * np.repeat(scale, 32, 1)
    values = formats.E4M3[array]
    if "engram.embed" in name:
        return values * np.repeat(scale, 32, 1)
    return values * np.repeat(np.repeat(scale, block, 0), block, 1)[: values.shape[0], : values.shape[1]]
