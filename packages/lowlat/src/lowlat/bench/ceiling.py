"""The read ceiling: how fast this device reads memory and does nothing else. Every fraction is of this, same run."""

from __future__ import annotations

import time
from typing import Any

import msgspec


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
    return _measure_cuda(gigabytes or 8.6, repeats) if device == "cuda" else _measure_cpu(gigabytes or 0.5, repeats)


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


def _read_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def read(source, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Each program adds every programs-th block and writes one sum, so that no load can be dropped."""
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        offsets = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.int32)
        for block in range(program, count // BLOCK, programs):
            total += tl.load(source + tl.cast(block, tl.int64) * BLOCK + offsets)
        tl.store(result + program, tl.sum(total, axis=0))

    return read


def _measure_cuda(gigabytes: float, repeats: int) -> Ceiling:
    import torch

    free, _ = torch.cuda.mem_get_info()
    block = 4096
    count = int(min(gigabytes * 1e9, 0.6 * free)) // 4 // block * block
    if count < 16 * block:
        raise RuntimeError(f"{free / 1e9:.1f} GB are free: too few to measure the read ceiling")
    data = torch.ones(count, dtype=torch.int32, device="cuda")
    try:
        read = _read_kernel()
        programs = torch.cuda.get_device_properties(0).multi_processor_count * 8
        result = torch.empty(programs, dtype=torch.int32, device="cuda")
        method = "Triton read kernel, 16-byte loads"

        def once() -> None:
            read[(programs,)](data, result, count, BLOCK=block, num_warps=8)

        once()
        if int(result.sum()) != count:
            raise RuntimeError("the read kernel did not read every element")
    except ImportError:
        method = "torch sum"

        def once() -> None:
            data.view(torch.float32).sum()

    once()
    best = float("inf")
    event: Any = torch.cuda.Event
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        once()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return Ceiling(round(count * 4 / best / 1e12, 4), method, count * 4)
