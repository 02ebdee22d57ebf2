"""How fast each multiprocessor is given weights while all read: measured on the device when a model is built.

Suffixes: B blocks, P pages, E elements of one page of all warps.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lowlat_nvidia.dense.plan import BLOCKS, ROLES, WARPS, DensePlan
from lowlat_nvidia.jit import Function, compile_cubin

THREADS = 384
LAUNCHES = 9
COUNTED = 0.6  # of the pages: the fastest blocks are then still reading
LIMIT_CYCLES = 1_000_000_000
REST = 255


class _Pace(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("cycles", ctypes.c_void_p),
        ("pages", ctypes.c_int),
        ("counted", ctypes.c_int),
        ("limit", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Paces:
    """Cycles for the same pages, by block, and which block's work each multiprocessor does (REST: none)."""

    cycles: list[float]
    roles: list[int]

    @property
    def multiprocessors(self) -> int:
        return len(self.roles)


def roles_of(launches: list[dict[int, float]], multiprocessors: int) -> Paces:
    """Of several launches, each the cycles by multiprocessor. The multiprocessors of the last one work in all steps.

    Raises ValueError where a launch does not have a multiprocessor for each block.
    """
    seen: dict[int, list[float]] = defaultdict(list)
    for launch in launches:
        for number, cycles in launch.items():
            seen[number].append(cycles)
    used = sorted(launches[-1])
    came = all(min(each) > 0 for each in seen.values())
    if len(used) != BLOCKS or used[-1] >= min(multiprocessors, ROLES) or not came:
        late = "" if came else ", pages that did not come"
        raise ValueError(f"{BLOCKS} blocks on {len(used)} multiprocessors of {multiprocessors}{late}")
    roles = [REST] * multiprocessors
    for block, number in enumerate(used):
        roles[number] = block
    return Paces([median(seen[number]) for number in used], roles)


def measure(plan: DensePlan, stream_PE: Tensor, pages: int) -> Paces:
    """Reads the last pages of the packed weights, those of the logits, some times: a few milliseconds."""
    device = stream_PE.device
    ring = plan.kernel(1).ring_pages
    definitions = {"RING_PAGES": ring, "PAGE_BYTES": plan.page_bytes, "BLOCKS": BLOCKS}
    shared = WARPS * ring * (plan.page_bytes + 8)
    function = Function(compile_cubin("pace.cu", definitions)[0], "pace", shared)
    cycles_B2 = torch.zeros((BLOCKS, 2), dtype=torch.int64, device=device)
    counted = max(1, int(COUNTED * pages))
    parameters = _Pace(stream_PE[-pages:].data_ptr(), cycles_B2.data_ptr(), pages, counted, LIMIT_CYCLES)
    launches = []
    for _ in range(LAUNCHES):
        function.launch(BLOCKS, THREADS, parameters, torch.cuda.current_stream(device).cuda_stream)
        launches.append({int(number): float(cycles) for cycles, number in cycles_B2.tolist()})
    function.close()
    return roles_of(launches[1:], torch.cuda.get_device_properties(device).multi_processor_count)
