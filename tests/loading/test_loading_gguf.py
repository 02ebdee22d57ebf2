"""The GGUF reader: equal to the `gguf` package, and calm with damaged and hostile files."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_llama import TinyLlama, write

from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.ggml_types import GGML_TYPES
from lowlat.models.loading.gguf import GGUFError, GGUFFile
from lowlat.models.loading.gguf_model import GGUFModel
from lowlat.models.loading.registry import embedded_path

SUPPORTED = [kind for kind in GGML_TYPES.values() if kind.to_float32 is not None]


@pytest.mark.parametrize("number", GGML_TYPES)
def test_block_sizes(number: int) -> None:
    kind = GGML_TYPES[number]
    theirs = gguf.GGMLQuantizationType(number)
    assert kind.name == theirs.name
    assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 2), (7, 5)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_dequantised_values(kind: Any, rows: int, blocks: int) -> None:
    random = np.random.default_rng(rows)
    data = random.integers(0, 256, (rows, blocks * kind.block_bytes), dtype=np.uint8)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind.name])
    values = kind.to_float32(data)
    assert values.dtype == np.float32
    assert values.shape == (rows, blocks * kind.block_values)
    # Random scales may be infinite or not a number; the same places must be.
    np.testing.assert_array_equal(values, expected)
    # Columns and rows of a larger array, not contiguous.
    padded = np.full((rows, data.shape[1] + 3), 255, np.uint8)
    padded[:, : data.shape[1]] = data
    np.testing.assert_array_equal(kind.to_float32(padded[:, : data.shape[1]]), values)


def test_every_value_of_the_embedded_model_that_is_checked() -> None:
    """Metadata, the list of tensors, and one tensor of each type, against the `gguf` package."""
    path = embedded_path("smollm2")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.version == 3
    kept = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(kept)
    for key, field in kept.items():
        mine = ours.metadata[key]
        expected = field.contents()
        assert (mine.tolist() if isinstance(mine, np.ndarray) else mine) == expected, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    seen = set()
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.type.name, info.offset, info.size) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(int(n) for n in tensor.shape[::-1])
        if info.type.name not in seen:
            seen.add(info.type.name)
            expected_values = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(ours.dequantize(tensor.name), expected_values.reshape(info.shape))
    assert seen == {"F32", "Q4_1", "Q8_0"}


def test_rows_and_raw_blocks(tiny: Callable[..., Any]) -> None:
    path, _ = tiny(matrix_type="Q8_0")
    file = GGUFFile(path)
    whole = file.dequantize("blk.0.ffn_up.weight")
    np.testing.assert_array_equal(file.dequantize("blk.0.ffn_up.weight", slice(5, 9)), whole[5:9])
    order = np.array([7, 0, 7])
    np.testing.assert_array_equal(file.dequantize("blk.0.ffn_up.weight", order), whole[order])
    raw = file.raw("blk.0.ffn_up.weight")
    assert (raw.type.name, raw.shape, raw.blocks.shape) == ("Q8_0", (96, 64), (96, 2 * 34))
    assert not raw.blocks.flags.writeable
    with pytest.raises(ValueError, match="rows of"):
        file.dequantize("output_norm.weight", slice(0, 1))


def test_version_2(tiny: Callable[..., Any]) -> None:
    path, values = tiny()
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    file = GGUFFile(path)
    assert file.version == 2
    np.testing.assert_array_equal(file.dequantize("output_norm.weight"), values["model.norm.weight"])


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ROOM = bytes(4096)
HUGE = 2**62
HOSTILE = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" + ROOM, "not a GGUF file"),
    "cut in the head": (b"GGUF\x03\x00", "cut short"),
    "version 1": (head(version=1) + ROOM, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + ROOM, "big-endian"),
    "huge number of keys": (head(keys=HUGE) + ROOM, "cannot fit"),
    "huge number of tensors": (head(tensors=HUGE) + ROOM, "cannot fit"),
    "huge key": (head(keys=1) + struct.pack("<Q", HUGE) + ROOM, "bytes long"),
    "huge string": (head(keys=1) + string(b"k") + struct.pack("<IQ", 8, HUGE) + ROOM, "cut short"),
    "huge array of numbers": (head(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 4, HUGE) + ROOM, "cut short"),
    "huge array of strings": (head(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + ROOM, "more than"),
    "strings behind the end": (head(keys=1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2) + b"\xff" * 64, "behind"),
    "deep arrays": (head(keys=1) + string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + ROOM, "nested"),
    "unknown value type": (head(keys=1) + string(b"k") + struct.pack("<I", 99) + ROOM, "unknown type 99"),
    "key that is not UTF-8": (head(keys=1) + string(b"\xff") + struct.pack("<IB", 0, 1) + ROOM, "not UTF-8"),
    "key twice": (head(keys=2) + (string(b"k") + struct.pack("<IB", 0, 1)) * 2 + ROOM, "twice"),
    "bad alignment": (
        head(keys=1) + string(b"general.alignment") + struct.pack("<II", 4, 24) + ROOM,
        "power of two",
    ),
    "tensor twice": (head(tensors=2) + tensor(b"t", [4]) * 2 + ROOM, "twice"),
    "too many dimensions": (head(tensors=1) + tensor(b"t", [1] * 9) + ROOM, "9 dimensions"),
    "overflowing shape": (head(tensors=1) + tensor(b"t", [2**63, 2**63]) + ROOM, "more bytes than"),
    "empty shape": (head(tensors=1) + tensor(b"t", [0, 4]) + ROOM, "empty"),
    "unknown tensor type": (head(tensors=1) + tensor(b"t", [4], kind=77) + ROOM, "unknown type 77"),
    "rows of half blocks": (head(tensors=1) + tensor(b"t", [48], kind=8) + ROOM, "whole blocks"),
    "offset behind the end": (head(tensors=1) + tensor(b"t", [4], offset=HUGE) + ROOM, "more bytes than"),
    "crooked offset": (head(tensors=1) + tensor(b"t", [4], offset=3) + ROOM, "multiple"),
    "data cut short": (head(tensors=1) + tensor(b"t", [1000], offset=256) + ROOM, "cut short"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_named_errors(tmp_path: Path, case: str) -> None:
    data, words = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=words) as caught:
        GGUFFile(path)
    assert "hostile.gguf" in str(caught.value)


def test_every_truncation_is_a_named_error(tiny: Callable[..., Any]) -> None:
    path, _ = tiny(layers=1)
    data = path.read_bytes()
    size = GGUFFile(path).header_size
    for length in [*range(1, size, 37), size, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(GGUFError):
            GGUFFile(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"
    write(path, TinyLlama(layers=1))
    return path, path.read_bytes(), GGUFFile(path).header_size


@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_damaged_heads_load_or_are_named_errors(sound: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, original, size = sound
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, size - 8))
        value = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(value)] = value
    path.write_bytes(changed)
    with contextlib.suppress(CheckpointError):
        model = GGUFModel(GGUFFile(path))
        model.tokenizer()
        for name in model.weights:
            for _ in model.read(name):
                pass
