"""Memory of a GPU that the GPUs of the other ranks of a host write to directly.

Each rank takes a plain allocation and opens the others' by CUDA's handles for other processes; nothing is multicast.
The driver is called by ctypes: a rank needs five of its functions, and PyTorch offers none of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from lowlat.parallel.group import Communicator

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """Memory cannot be shared between these GPUs; the text says which rank found what."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class PeerMemory:
    """`size` bytes of zeros on every rank's GPU, at `addresses[rank]` as this rank's GPU sees them.

    The memory lives as long as the process: peers may write to it until the last of them has ended.
    """

    def __init__(self, communicator: Communicator, size: int, device: torch.device) -> None:
        """All ranks call this together. Raises `PeerMemoryError` on all of them where one cannot take part."""
        self.size = size
        self._rank, ranks = communicator.shard.rank, communicator.shard.size
        self._device = device
        self.addresses = [0] * ranks
        handles = torch.zeros(ranks, _HANDLE_BYTES, dtype=torch.uint8)

        def allocate() -> None:
            _check_access(ranks, device)
            self.addresses[self._rank], handles[self._rank] = _allocate(size, device)

        def map_others() -> None:
            for other in range(ranks):
                if other != self._rank:
                    self.addresses[other] = _open(handles[other])

        _together(communicator, allocate)
        # Every rank has filled in a row of zeros, so the sum holds all.
        communicator.all_reduce(handles)
        _together(communicator, map_others)

    def fill_word(self, offset: int, value: int) -> None:
        """Write a 32-bit word of this rank's memory, beside whatever its GPU computes. From any thread."""
        torch.cuda.set_device(self._device)
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        own = ctypes.c_uint64(self.addresses[self._rank] + offset)
        _call("cuMemsetD32Async", own, ctypes.c_uint(value), ctypes.c_size_t(1), ctypes.c_void_p(stream.cuda_stream))


def _together(communicator: Communicator, work: Any) -> None:
    """Do `work` on every rank. Raises `PeerMemoryError` on all of them when it fails on one."""
    failed = torch.zeros(communicator.shard.size, dtype=torch.int64)
    reason = "another rank says why"
    try:
        work()
    except OSError as error:
        failed[communicator.shard.rank] = 1
        reason = str(error)
    communicator.all_reduce(failed)
    if failed.any():
        raise PeerMemoryError(f"ranks {failed.nonzero().flatten().tolist()} cannot share memory: {reason}")


def _check_access(ranks: int, device: torch.device) -> None:
    for other in range(ranks):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            raise OSError(f"GPU {device.index} has no access to the memory of GPU {other}")


def _allocate(size: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """Zeros on the device: their address, and the handle by which other processes open them, uint8."""
    torch.zeros(1, device=device)  # the driver's functions work in the context that PyTorch made current
    address, handle = ctypes.c_uint64(), _Handle()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    _call("cuCtxSynchronize")
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address.value, torch.tensor(list(handle.reserved), dtype=torch.uint8)


def _open(handle_B: torch.Tensor) -> int:
    """The address at which this GPU sees the memory of another process."""
    address, handle = ctypes.c_uint64(), _Handle()
    handle.reserved[:] = handle_B.tolist()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return address.value


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises `OSError` with the driver's own words for what went wrong."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        raise OSError(f"{name}: {text.value.decode() if text.value else status}")
