"""Compiling and launching CUDA C++ without a toolkit: NVRTC and the driver, through `cuda-bindings`.

A compiled module is cached on disk by the hash of its sources, definitions, options and compiler version.
LOWLAT_NVRTC_OPTIONS adds options of the compiler: `--generate-line-info` lets compute-sanitizer name source lines.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

TENSOR_MAP = 128
"""Bytes of a description of a tensor for the copy engine."""


class BuildError(RuntimeError):
    """A kernel did not compile or load; the text holds the compiler's log."""


class MissingCudaError(RuntimeError):
    """The packages that compile and launch kernels are absent."""


def _bindings() -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise MissingCudaError("cuda-bindings is missing: pip install 'lowlat-nvidia[cuda]'") from error
    return driver, nvrtc


def sources() -> dict[str, str]:
    """The kernel sources by file name."""
    folder = resources.files("lowlat_nvidia") / "csrc"
    return {file.name: file.read_text() for file in folder.iterdir() if file.name.endswith((".cu", ".cuh"))}


def cache_folder() -> Path:
    """Where compiled kernels are kept: LOWLAT_CACHE, else the user's cache folder."""
    root = os.environ.get("LOWLAT_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "lowlat" / "nvidia"


def compile_cubin(
    name: str, definitions: Mapping[str, int], arch: str = "sm_90a", cache: bool = True, verbose: bool = False
) -> tuple[bytes, str]:
    """Machine code of the source file `name` with macros defined, and the compiler's log (empty when cached).

    Raises BuildError with the log, MissingCudaError without the packages.
    """
    _, nvrtc = _bindings()
    texts = sources()
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--extra-device-vectorization"]
    if verbose:
        options.append("--ptxas-options=-v")
    options += [f"-D{key}={value}" for key, value in sorted(definitions.items())]
    options += os.environ.get("LOWLAT_NVRTC_OPTIONS", "").split()
    error, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, error, "nvrtcVersion")
    digest = hashlib.sha256(repr((sorted(texts.items()), name, options, major, minor)).encode()).hexdigest()
    path = cache_folder() / f"{name}-{digest[:32]}.cubin"
    if cache and path.exists():
        return path.read_bytes(), ""
    headers = {key: text for key, text in texts.items() if key.endswith(".cuh")}
    error, program = nvrtc.nvrtcCreateProgram(
        texts[name].encode(),
        name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [key.encode() for key in headers],
    )
    _check(nvrtc, error, "nvrtcCreateProgram")
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"{name} did not compile ({error.name}):\n{log}")
        error, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, error, "nvrtcGetCUBINSize")
        cubin = b" " * size
        (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(nvrtc, error, "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if cache:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(cubin)
        partial.replace(path)
    return cubin, log


def _text(nvrtc: Any, size_of: Any, read: Any, program: Any) -> str:
    error, size = size_of(program)
    _check(nvrtc, error, "log size")
    text = b" " * (size + 1)  # of one byte Python has one object for all, in which the compiler would write
    (error,) = read(program, text)
    _check(nvrtc, error, "log")
    return str(text.rstrip(b"\0 "), errors="replace")


def _check(library: Any, error: Any, what: str) -> None:
    if int(error) != 0:
        raise BuildError(f"{what} failed: {error.name}")


class Function:
    """A loaded kernel. `launch` puts it on a stream; all its blocks are resident together or the launch fails."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        driver, _ = _bindings()
        self._driver = driver
        error, self._context = driver.cuCtxGetCurrent()
        _check(driver, error, "cuCtxGetCurrent")
        error, self._module = driver.cuModuleLoadData(cubin)
        _check(driver, error, "cuModuleLoadData")
        error, self._function = driver.cuModuleGetFunction(self._module, name.encode())
        _check(driver, error, f"looking up {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
        _check(driver, error, f"asking for {shared_bytes} bytes of shared memory")
        # Kernels that start beside each other must agree on how a multiprocessor's memory is divided between shared
        # memory and L1, or the later one waits until the multiprocessor is empty.
        carve_out = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (error,) = driver.cuFuncSetAttribute(self._function, carve_out, 100)
        _check(driver, error, "asking for as much shared memory as there is")
        self._shared = shared_bytes

    def launch(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, early: bool = False
    ) -> None:
        """One cooperative launch with a single parameter, a structure passed by value. Capturable in graphs.

        With `early` it may start before the kernel before it has ended, as `launch_early` says. A thread that has not
        touched the device yet gets the context in which the kernel was loaded.
        """
        error, current = self._driver.cuCtxGetCurrent()
        if int(error) or not int(current):
            (error,) = self._driver.cuCtxSetCurrent(self._context)
            _check(self._driver, error, "cuCtxSetCurrent")
        self._launch(blocks, threads, parameters, stream, cooperative=True, early=early)

    def launch_early(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, dependent: bool = True
    ) -> None:
        """One launch that may start before the kernel before it has ended (programmatic dependent launch).

        The kernel waits for what it needs with `griddepcontrol.wait`. Without `dependent` it starts as usual.
        Capturable in graphs.
        """
        self._launch(blocks, threads, parameters, stream, cooperative=False, early=dependent)

    def _launch(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, cooperative: bool, early: bool
    ) -> None:
        driver = self._driver
        config, kinds = driver.CUlaunchConfig(), driver.CUlaunchAttributeID
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self._shared, stream
        attributes = []
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id, attribute.value.cooperative = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
            attributes.append(attribute)
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        (error,) = driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        _check(driver, error, "cuLaunchKernelEx")

    @staticmethod
    def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
        """Describes a bfloat16 tensor for copies of boxes into shared memory, swizzled over 128 bytes.

        `sizes` and `box` in elements, `strides` in bytes; innermost dimension first, which has no stride.
        Raises BuildError where the driver takes no such tensor.
        """
        rank = len(sizes)
        room = ctypes.create_string_buffer(TENSOR_MAP + 64)
        start = -ctypes.addressof(room) % 64
        bfloat16, no_interleave, swizzle_128, promote_128, zeros = 9, 0, 3, 2, 0
        status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(room) + start), bfloat16, rank, ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank), no_interleave, swizzle_128, promote_128, zeros,
        )  # fmt: skip
        if status:
            raise BuildError(f"no tensor map of sizes {sizes}, strides {strides}: error {status}")
        return room.raw[start : start + TENSOR_MAP]

    def attributes(self) -> dict[str, int]:
        """Registers a thread, bytes of local memory a thread."""
        kinds = self._driver.CUfunction_attribute
        found = {}
        for name, kind in (
            ("registers", kinds.CU_FUNC_ATTRIBUTE_NUM_REGS),
            ("local", kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
        ):
            error, value = self._driver.cuFuncGetAttribute(kind, self._function)
            _check(self._driver, error, name)
            found[name] = value
        return found

    def close(self) -> None:
        self._driver.cuModuleUnload(self._module)
