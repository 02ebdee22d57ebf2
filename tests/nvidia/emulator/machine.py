"""Kernels' own sources on a CPU: compiled by g++ with the emulated instructions in the headers beside this."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowlat_nvidia import jit

HERE = Path(__file__).parent
EMULATED = ("ptx.cuh", "system.cuh", "tensor.cuh")


@dataclass(frozen=True)
class Source:
    """A file, the type of its kernels' parameter, and their names."""

    file: str
    parameters: str
    kernels: tuple[str, ...]


DENSE = Source("dense_step.cu", "Params", ("dense_step",))
EXPERTS = Source("experts.cu", "Params", ("experts_products",))
OUTPUT = Source("output_projection.cu", "Params", ("output_project",))
MARKOV = Source("markov.cu", "Params", ("markov_proposals",))
CHAIN = Source("attention_chain.cu", "Chain", ("down_project", "up_project", "attend", "group_project"))


def available() -> bool:
    return shutil.which("g++") is not None and platform.machine() == "x86_64"


def build(
    code: Source,
    definitions: Mapping[str, int],
    folder: Path,
    changes: Mapping[str, tuple[str, str]] | None = None,
) -> Path:
    """A shared library of kernels with macros defined. `changes` replaces one text in a source, by file name."""
    texts = {name: text for name, text in jit.sources().items() if name not in EMULATED}
    for name, (old, new) in (changes or {}).items():
        if texts[name].count(old) != 1:
            raise AssertionError(f"{old!r} is not once in {name}")
        texts[name] = texts[name].replace(old, new)
    for name in (*EMULATED, "machine.cpp"):
        texts[name] = (HERE / name).read_text()
    options = [f"-D{key}={value}" for key, value in sorted(definitions.items())]
    options += [f'-DSOURCE="{code.file}"', f"-DPARAMETERS={code.parameters}", f"-DKERNELS={','.join(code.kernels)}"]
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
        # An index beyond an array ends the run by an illegal instruction; on a GPU it is another array's entry.
        "-fsanitize=bounds",
        "-fsanitize-undefined-trap-on-error",
        *options,
        "-o",
        str(target),
        str(source / "machine.cpp"),
    ]
    subprocess.run(command, check=True)
    return target


class Request(ctypes.Structure):
    """One launch."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kernel", "blocks", "cluster", "shared_bytes")),
        ("parameters", ctypes.c_void_p),
    )


@functools.lru_cache(1)
def stacks(size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Memory for the stacks of all threads, used again by later launches of any library."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # With small pages most switches wait for a translation; a system without large ones refuses.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_ubyte * size).from_buffer(memory)


class Machine:
    """Runs launches. Those of `launch_early` may overlap: they are kept until `finish`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emu_run.restype = ctypes.c_bool
        self.seed = 1
        self.requests: list[Request] = []
        self.kept: list[ctypes.Structure] = []

    def finish(self, threads: int) -> None:
        requests, self.requests, self.seed = self.requests, [], self.seed + 1
        array = (Request * len(requests))(*requests)
        size = sum(request.blocks for request in requests) * threads * self.library.emu_stack_bytes()
        memory = stacks(1 << (size - 1).bit_length())  # rounded, so that most launches want the same
        ended = self.library.emu_run(array, len(requests), threads, self.seed, memory)
        self.kept.clear()
        if not ended:
            raise RuntimeError("the emulated launches do not end")


class EmulatedFunction:
    """Stands in for `jit.Function`."""

    def __init__(self, machine: Machine, which: int, cluster: int, shared_bytes: int) -> None:
        self.machine, self.which, self.cluster, self.shared = machine, which, cluster, shared_bytes

    def launch(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, early: bool = False
    ) -> None:
        self.launch_early(blocks, threads, parameters, stream)
        self.machine.finish(threads)

    def launch_early(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, dependent: bool = True
    ) -> None:
        if not dependent and self.machine.requests:
            self.machine.finish(threads)
        self.machine.kept.append(parameters)
        self.machine.requests.append(
            Request(self.which, blocks, self.cluster, self.shared, ctypes.addressof(parameters))
        )

    @staticmethod
    def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        assert list(box) == [64, 16, 1, sizes[3]], "boxes of 16 slots"
        return struct.pack("4q", address, strides[0], strides[1], sizes[3]).ljust(jit.TENSOR_MAP, b"\0")

    def close(self) -> None:
        pass


class CompiledWhenLaunched(EmulatedFunction):
    """Of steps with two kernels most tests launch one."""

    def __init__(self, library: Callable[[], Path], which: int, cluster: int, shared_bytes: int) -> None:
        self.library, self.which, self.cluster, self.shared = library, which, cluster, shared_bytes

    @functools.cached_property
    def machine(self) -> Machine:
        return Machine(self.library())


class OneAtATime(EmulatedFunction):
    """One of several kernels of a source, which runs as soon as it is launched, in clusters of one block."""

    def __init__(self, machine: Machine, name: str, shared_bytes: int) -> None:
        super().__init__(machine, 0, 1, shared_bytes)
        self.name = name

    def launch_early(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, dependent: bool = True
    ) -> None:
        super().launch_early(blocks, threads, parameters, stream)
        self.machine.finish(threads)
