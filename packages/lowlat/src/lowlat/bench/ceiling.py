"""The read ceiling: how fast this device reads memory and does nothing else. Every fraction is of this, same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

_UNIT = 65536
"""Elements: sizes of buffers on a GPU are multiples of it."""


class Ceiling(msgspec.Struct, frozen=True):
    """Best observed read bandwidth in TB/s, how it was read, and the bytes of one pass."""

    tb_s: float
    method: str
    bytes: int


def measure_ceiling(device: str, *, gigabytes: float | None = None, repeats: int = 9) -> Ceiling:
    """Read a buffer far larger than the caches `repeats` times; the best pass counts.

    `device` is `cpu` or `cuda`. Default sizes: 8.6 GB on a GPU (at most 60 % of what is free), 0.5 GB on a CPU, where
    the current number of torch threads reads. Raises RuntimeError where the buffer does not fit.
    """
    if device != "cuda":
        return _measure_cpu(gigabytes or 0.5, repeats)
    import torch

    found = _measure_cuda(gigabytes or 8.6, repeats)
    torch.cuda.empty_cache()
    return found


def _measure_cpu(gigabytes: float, repeats: int) -> Ceiling:
    import torch

    # Pages are touched by ones(), so no page fault is timed. Sums of float32 stream at memory speed.
    data = torch.ones(int(gigabytes * 1e9 / 4), dtype=torch.float32)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    size = data.numel() * 4
    return Ceiling(round(size / best / 1e12, 5), f"torch sum, {torch.get_num_threads()} threads", size)


def _measure_cuda(gigabytes: float, repeats: int) -> Ceiling:
    import torch

    from lowlat.bench.arms.torch_step import time_cuda

    free, _ = torch.cuda.mem_get_info()
    count = int(min(gigabytes * 1e9, 0.6 * free)) // 4 // _UNIT * _UNIT
    if count < 16 * _UNIT:
        raise RuntimeError(f"{free / 1e9:.1f} GB are free: too few to measure the read ceiling")
    data = torch.ones(count, dtype=torch.int32, device="cuda")
    once: Callable[[], object]
    try:
        from lowlat.bench.read_kernel import BLOCK, Reader
    except ImportError:
        method = "torch sum"
        numbers = data.view(torch.float32)
        once = numbers.sum
    else:
        assert _UNIT % BLOCK == 0
        method = "Triton read kernel, 16-byte loads"
        once = reader = Reader(data)
        once()
        if reader.total() != count:
            raise RuntimeError("the read kernel did not read every element")
    once()
    best = min(time_cuda(once, repeats)) / 1e6
    return Ceiling(round(count * 4 / best / 1e12, 4), method, count * 4)
