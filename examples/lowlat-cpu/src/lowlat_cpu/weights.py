"""From a GGUF file to the model struct that the compiled step takes. No weight is rounded on the way.

GGUF's writers reorder the rows of llama query and key matrices so that rotary pairs are neighbours. KV caches of this
project hold heads with the two halves apart, so the rows are put back.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lowlat_cpu import gguf, native

FORMATS = {gguf.Q4_1: native.Q4_1, gguf.Q8_0: native.Q8_0}
LAYER_MATRICES = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
ALIGNED = 64
"""Bytes of a cache line, and of a vector."""
Allocate = Callable[[int], np.ndarray]


class UnsupportedFile(ValueError):  # noqa: N818 - a refusal
    """The file holds something that the compiled step has no code for. `faults` lists all of it."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("; ".join(faults))


class PackedModel:
    """A model struct and everything it points to. Memory for weights comes from `allocate(bytes)`, uint8."""

    def __init__(self, path: Path, library: native.Library, allocate: Allocate, threads: int) -> None:
        self._file = gguf.GGUFFile(path)
        faults = file_faults(self._file) or shape_faults(self._file)
        if faults:
            raise UnsupportedFile(faults)
        self._library, self._allocate = library, allocate
        self._kept: list[np.ndarray] = []
        self.struct = self._shape(threads)
        self._layers = (native.Layer * self.struct.layers)()
        self.struct.layer = c.addressof(self._layers)
        for index, layer in enumerate(self._layers):
            self._fill(layer, index)
        self.struct.final_norm = self._vector("output_norm.weight")
        self.struct.embedding = self._matrix("token_embd.weight")
        tied = "output.weight" not in self._file.tensors
        self.struct.head = self.struct.embedding if tied else self._matrix("output.weight")

    def _shape(self, threads: int) -> native.Model:
        struct = native.Model(**sizes(self._file), threads=threads)
        struct.epsilon = self._file.metadata["llama.attention.layer_norm_rms_epsilon"]
        exponents = np.arange(0, struct.head_dim, 2, dtype=np.float32) / np.float32(struct.head_dim)
        base = np.float32(self._file.metadata.get("llama.rope.freq_base", 10000.0))
        struct.frequencies = self._keep((np.float32(1.0) / base**exponents).astype(np.float32))
        return struct

    def _fill(self, layer: native.Layer, index: int) -> None:
        prefix = f"blk.{index}."
        layer.attention_norm = self._vector(prefix + "attn_norm.weight")
        layer.mlp_norm = self._vector(prefix + "ffn_norm.weight")
        for field, name in LAYER_MATRICES.items():
            heads = {"query": self.struct.heads, "key": self.struct.kv_heads}.get(field)
            setattr(layer, field, self._matrix(f"{prefix}{name}.weight", heads))

    def _matrix(self, name: str, rotary_heads: int | None = None) -> native.Matrix:
        info = self._file.tensors[name]
        rows, columns = info.shape
        matrix = native.Matrix(format=FORMATS[info.kind], rows=rows, columns=columns)
        order = np.arange(rows, dtype=np.int64) if rotary_heads is None else halves_apart(rows, rotary_heads)
        out = self._allocate(matrix.nbytes())
        self._kept.append(out)
        return self._library.pack(self._file.raw(name), order, out, matrix)

    def _vector(self, name: str) -> int:
        return self._keep(self._file.vector(name).copy())

    def _keep(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)


def sizes(file: gguf.GGUFFile) -> dict[str, int]:
    """The model's sizes by the struct's names. Raises KeyError or TypeError where the metadata lacks one."""
    read = {key.partition(".")[2]: value for key, value in file.metadata.items() if key.startswith("llama.")}
    heads, hidden = read["attention.head_count"], read["embedding_length"]
    found = {
        "layers": read["block_count"],
        "hidden": hidden,
        "inner": read["feed_forward_length"],
        "heads": heads,
        "kv_heads": read.get("attention.head_count_kv", heads),
        "head_dim": read.get("attention.key_length", hidden // max(heads, 1)),
        "vocabulary": file.tensors["token_embd.weight"].shape[0],
    }
    return {name: int(value) for name, value in found.items()}


def shape_faults(file: gguf.GGUFFile) -> list[str]:
    """Where tensors are missing or of another shape than the metadata says: compiled code trusts both."""
    try:
        model = sizes(file)
    except (KeyError, TypeError, ValueError) as error:
        return [f"the metadata has no usable {error}"]
    if min(model.values()) < 1 or model["heads"] % model["kv_heads"] or model["head_dim"] % native.LANES:
        return [f"these sizes do not make a model: {model}"]
    hidden, inner = model["hidden"], model["inner"]
    query, key = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    wanted = {"token_embd.weight": (model["vocabulary"], hidden), "output_norm.weight": (hidden,)}
    if "output.weight" in file.tensors:
        wanted["output.weight"] = (model["vocabulary"], hidden)
    for layer in range(model["layers"]):
        shapes = ((query, hidden), (key, hidden), (key, hidden), (hidden, query), (inner, hidden), (inner, hidden))
        names = LAYER_MATRICES.values()
        wanted |= {f"blk.{layer}.{n}.weight": shape for n, shape in zip(names, (*shapes, (hidden, inner)), strict=True)}
        wanted |= {f"blk.{layer}.{n}.weight": (hidden,) for n in ("attn_norm", "ffn_norm")}
    found = {name: file.tensors[name].shape if name in file.tensors else None for name in wanted}
    return [f"{name} is {found[name]}, wanted {shape}" for name, shape in wanted.items() if found[name] != shape]


def halves_apart(rows: int, heads: int) -> np.ndarray:
    """For each row with a head's halves apart, the row of the file, where the halves alternate."""
    per_head = rows // heads
    alternating = np.arange(rows, dtype=np.int64).reshape(heads, per_head // 2, 2)
    return np.ascontiguousarray(alternating.transpose(0, 2, 1)).reshape(-1)


def packed_bytes(file: gguf.GGUFFile) -> int:
    """Memory that a file's matrices take once interleaved, each from a whole `ALIGNED` bytes on."""
    total = ALIGNED
    for info in file.tensors.values():
        if len(info.shape) == 2 and info.kind in FORMATS:
            matrix = native.Matrix(format=FORMATS[info.kind], rows=info.shape[0], columns=info.shape[1])
            total += -(-matrix.nbytes() // ALIGNED) * ALIGNED
    return total


def in_one_piece(memory: np.ndarray) -> Allocate:
    """Parts of `memory` (uint8) one after another, from whole `ALIGNED` bytes on."""
    used = -memory.ctypes.data % ALIGNED

    def allocate(count: int) -> np.ndarray:
        nonlocal used
        part = memory[used : used + count]
        used += -(-count // ALIGNED) * ALIGNED
        return part

    return allocate


def file_faults(file: gguf.GGUFFile) -> list[str]:
    """Everything about a file that is not covered, in words."""
    faults = []
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        faults.append(f"architecture {architecture!r}, wanted 'llama'")
    for name, info in file.tensors.items():
        wanted = FORMATS if len(info.shape) == 2 else {gguf.F32: 0}
        if info.kind not in wanted:
            faults.append(f"{name} is of GGUF type {info.kind}, wanted Q4_1 or Q8_0 for matrices, F32 for vectors")
        elif len(info.shape) == 2 and info.shape[1] % gguf.BLOCK:
            faults.append(f"{name} has {info.shape[1]} columns, wanted a multiple of {gguf.BLOCK}")
        elif name.startswith("rope_"):
            faults.append(f"{name}: scaled rotary frequencies are not covered")
    return faults
