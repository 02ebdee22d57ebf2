"""A kernel's own sources on a CPU: compiled by g++ with the emulated instructions in `ptx.cuh` beside this."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowlat_nvidia import jit
from lowlat_nvidia.dense import plan as plans

HERE = Path(__file__).parent


def available() -> bool:
    return shutil.which("g++") is not None and platform.machine() == "x86_64"


def build(
    definitions: Mapping[str, int],
    folder: Path,
    changes: Mapping[str, tuple[str, str]] | None = None,
    kernel: tuple[str, str] = ("dense_step.cu", "dense_step"),
) -> Path:
    """A shared library of the kernel (source file, name) with macros defined. `changes` replaces one text in a source,
    by file name."""
    texts = {name: text for name, text in jit.sources().items() if name != "ptx.cuh"}
    for name, (old, new) in (changes or {}).items():
        if texts[name].count(old) != 1:
            raise AssertionError(f"{old!r} is not once in {name}")
        texts[name] = texts[name].replace(old, new)
    for name in ("ptx.cuh", "system.cuh", "machine.cpp"):
        texts[name] = (HERE / name).read_text()
    options = [f"-D{key}={value}" for key, value in sorted(definitions.items())]
    options += [f'-DSOURCE="{kernel[0]}"', f"-DKERNEL={kernel[1]}"]
    digest = hashlib.sha256(repr((sorted(texts.items()), options)).encode()).hexdigest()[:16]
    target = folder / f"step-{digest}.so"
    if target.exists():
        return target
    source = folder / digest
    source.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (source / name).write_text(text)
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        *options,
        "-o",
        str(target),
        str(source / "machine.cpp"),
    ]
    subprocess.run(command, check=True)
    return target


class EmulatedFunction:
    """Stands in for `jit.Function`."""

    def __init__(self, library: Path, kv_heads: int, shared_bytes: int) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emu_run.restype = ctypes.c_bool
        self.kv_heads, self.shared = kv_heads, shared_bytes
        self.seed = 1

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int) -> None:
        self.seed += 1
        cluster = plans.BLOCKS // self.kv_heads
        if not self.library.emu_run(ctypes.byref(parameters), blocks, threads, cluster, self.shared, self.seed):
            raise RuntimeError("the emulated step does not end")

    @staticmethod
    def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        assert list(box) == [64, 16, 1, sizes[3]], "boxes of 16 slots"
        return struct.pack("4q", address, strides[0], strides[1], sizes[3]).ljust(jit.TENSOR_MAP, b"\0")

    def close(self) -> None:
        pass
