"""Memory that every rank of one host can write: plain allocations, shared by handles of the driver.

No multicast: what a rank says to all it stores once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowlat_nvidia.jit import _bindings, _check


class PeerAccessError(RuntimeError):
    """A GPU cannot reach another's memory; the text says which."""


class PeerBuffer:
    """`size` bytes of zeros on this rank's GPU, and the addresses of all ranks' buffers as this GPU sees them.

    `exchange` gives every rank's bytes in rank order, as `torch.distributed.all_gather_object` does; ranks are
    processes. It is called twice: for the handles, and so that no rank uses a buffer that is not opened everywhere.
    """

    def __init__(self, size: int, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        driver, _ = _bindings()
        self._driver, self.rank, self.size = driver, rank, size
        error, pointer = driver.cuMemAlloc(size)
        _check(driver, error, f"allocating {size} bytes")
        self._own = pointer
        (error,) = driver.cuMemsetD8(pointer, 0, size)
        _check(driver, error, "clearing the buffer")
        (error,) = driver.cuCtxSynchronize()
        _check(driver, error, "clearing the buffer")
        error, handle = driver.cuIpcGetMemHandle(pointer)
        _check(driver, error, "sharing the buffer")
        handles = exchange(bytes(handle.reserved))
        self.addresses: list[int] = []
        self._opened: list[Any] = []
        for other, raw in enumerate(handles):
            self.addresses.append(int(pointer) if other == rank else self._open(other, raw))
        exchange(b"opened")

    def _open(self, other: int, raw: bytes) -> int:
        driver = self._driver
        handle = driver.CUipcMemHandle()
        handle.reserved = raw
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        error, pointer = driver.cuIpcOpenMemHandle(handle, flag)
        if int(error):
            raise PeerAccessError(f"rank {self.rank} cannot reach the memory of rank {other}: {error.name}")
        self._opened.append(pointer)
        return int(pointer)

    def clear(self) -> None:
        """Zeros again, on this rank; waits."""
        for error in (*self._driver.cuMemsetD8(self._own, 0, self.size), *self._driver.cuCtxSynchronize()):
            _check(self._driver, error, "clearing the buffer")

    def read_word(self, offset: int) -> int:
        """One 32-bit word of this rank's buffer; waits."""
        word = bytearray(4)
        (error,) = self._driver.cuMemcpyDtoH(word, int(self._own) + offset, 4)
        _check(self._driver, error, "reading the buffer")
        return int.from_bytes(word, "little")

    def close(self) -> None:
        """Gives back what was opened, then the own buffer. Ranks close together."""
        for pointer in self._opened:
            self._driver.cuIpcCloseMemHandle(pointer)
        self._driver.cuMemFree(self._own)
