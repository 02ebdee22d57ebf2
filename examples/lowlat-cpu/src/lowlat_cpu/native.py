"""The compiled step: which instruction set, the structs it takes, and the calls. Mirrors csrc/step.cpp."""

from __future__ import annotations

import ctypes as c
import importlib.machinery
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Q4_1, Q8_0 = 0, 1
LANES = 16
MOST_ROWS = 8
INSTRUCTION_SETS = ("avx512vnni", "avx512", "avx2", "portable")
_POINTER = c.c_void_p


class Matrix(c.Structure):
    _fields_ = (("blocks", _POINTER), ("format", c.c_int32), ("rows", c.c_int32), ("columns", c.c_int32))

    def block_bytes(self) -> int:
        return LANES * (20 if self.format == Q4_1 else 34)

    def nbytes(self) -> int:
        """Bytes of the interleaved blocks; rows are filled up to whole groups of sixteen."""
        return int(-(-self.rows // LANES) * (self.columns // 32) * self.block_bytes())


class Layer(c.Structure):
    _fields_ = (
        ("attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
    )


class Model(c.Structure):
    _fields_ = (
        *(
            (name, c.c_int32)
            for name in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocabulary", "threads")
        ),
        ("epsilon", c.c_float),
        ("final_norm", _POINTER),
        ("frequencies", _POINTER),
        ("layer", _POINTER),
        ("embedding", Matrix),
        ("head", Matrix),
    )


class Step(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("rows", "requests", "page_size", "table_stride")),
        *((name, c.c_int64) for name in ("slot_stride", "head_stride", "logits_stride")),
        *(
            (name, _POINTER)
            for name in (
                "tokens",
                "positions",
                "write_slots",
                "query_start",
                "lengths",
                "page_table",
                "keys",
                "values",
                "logits",
                "workspace",
                "taps",
                "features",
            )
        ),
        ("tapped", c.c_int64),
    )


class Library:
    """One compiled variant, loaded."""

    def __init__(self, instruction_set: str) -> None:
        self.instruction_set = instruction_set
        loaded = c.CDLL(str(_file(instruction_set)))
        self.step = _declare(loaded.lowlat_cpu_step, None, _POINTER, _POINTER, c.c_int64)
        self.workspace = _declare(loaded.lowlat_cpu_workspace, c.c_int64, _POINTER, c.c_int, c.c_int64)
        self.interleave = _declare(loaded.lowlat_cpu_interleave, None, _POINTER, _POINTER, _POINTER, _POINTER)
        self.multiply = _declare(loaded.lowlat_cpu_multiply, None, _POINTER, _POINTER, _POINTER, c.c_int, c.c_int)
        self.read_row = _declare(loaded.lowlat_cpu_read_row, None, _POINTER, c.c_int, _POINTER)
        self.exponential = _declare(loaded.lowlat_cpu_exponential, None, _POINTER, _POINTER, c.c_int64)
        self.supports = _declare(loaded.lowlat_cpu_supports, c.c_int, c.c_char_p)

    def pack(self, raw: np.ndarray, order: np.ndarray, out: np.ndarray, matrix: Matrix) -> Matrix:
        """Interleave a file's blocks into `out` (uint8, `matrix.nbytes()` long) and point `matrix` there.

        `order` [rows] int64 names the file's row for each of ours.
        """
        matrix.blocks = out.ctypes.data
        self.interleave(raw.ctypes.data, order.ctypes.data, c.byref(matrix), out.ctypes.data)
        return matrix


def ask_for_huge_pages(memory: np.ndarray) -> None:
    """Let the system map memory that was not touched yet in large pages, where it can: every step reads all weights,
    and would miss the processor's table of small pages for each of them."""
    madvise = getattr(c.CDLL(None), "madvise", None) if os.name == "posix" else None
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = memory.ctypes.data + memory.nbytes - first
    if madvise is not None and hasattr(mmap, "MADV_HUGEPAGE") and length > 0:
        # Refused is no harm: pages stay small.
        _declare(madvise, c.c_int, _POINTER, c.c_size_t, c.c_int)(first, length, mmap.MADV_HUGEPAGE)


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _file(instruction_set: str) -> Path:
    here = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        found = here / f"_step_{instruction_set}{suffix}"
        if found.exists():
            return found
    raise FileNotFoundError(f"lowlat-cpu was installed without its {instruction_set} code: reinstall it")


def available() -> tuple[str, ...]:
    """Compiled variants that this machine can run, the fastest first."""
    portable = Library("portable")
    found = []
    for name in INSTRUCTION_SETS:
        try:
            built = _file(name).exists()
        except FileNotFoundError:
            built = False
        if built and portable.supports(name.encode()):
            found.append(name)
    return tuple(found)


@cache
def load(instruction_set: str | None = None) -> Library:
    """The best variant, or the one named here or by LOWLAT_CPU_ISA.

    Raises ValueError for a variant that this machine cannot run.
    """
    wanted = instruction_set or os.environ.get("LOWLAT_CPU_ISA") or None  # empty: not set
    usable = available()
    if wanted is not None and wanted not in usable:
        raise ValueError(f"instruction set {wanted!r} is not usable here; usable: {', '.join(usable)}")
    return Library(wanted or usable[0])
