"""A kernel that reads memory and does nothing else. Importing this module imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Elements that a program reads at a time: four 16-byte loads of each thread."""
WARPS = 8
PROGRAMS = 6
"""On each multiprocessor: as many as its registers hold, so that all run at a time."""


@triton.jit
def read_kernel(source_ptr, sums_ptr, count, BLOCK: tl.constexpr):
    """Each program adds every programs-th block and writes one sum, so that no load can be dropped."""
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(program, count // BLOCK, tl.num_programs(0)):
        total += tl.load(source_ptr + tl.cast(block, tl.int64) * BLOCK + place)
    tl.store(sums_ptr + program, tl.sum(total, axis=0))


class Reader:
    """Reads a tensor of int32, whose size is a multiple of `BLOCK`, on its device."""

    def __init__(self, data: torch.Tensor) -> None:
        processors = torch.cuda.get_device_properties(data.device).multi_processor_count
        self._data = data
        self._sums = torch.empty(processors * PROGRAMS, dtype=torch.int32, device=data.device)

    def __call__(self) -> None:
        """Read all of it once."""
        read_kernel[(len(self._sums),)](self._data, self._sums, self._data.numel(), BLOCK=BLOCK, num_warps=WARPS)

    def total(self) -> int:
        """What the elements add up to, as the last reading found."""
        return int(self._sums.sum())
