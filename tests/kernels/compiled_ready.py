"""Requests that meet each other, in an engine that is ready, compile no kernel: its start compiled all of them.

test_kernels_compile.py runs this in a process of its own, for a GPU that is not here. A kernel that is compiled when a
request comes holds up all others by a fifth of a second.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from compiled_ahead import NoDriver, cached, limits
from device_kit import EngineSize, RehearsedBodies, make_runner
from family_kit import build, random_tokens, save_random
from triton.runtime import driver, jit

from lowlat.engine.batch import PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.build import _first_step
from lowlat.engine.device_sampler import SamplingMode
from lowlat.layers.triton_ops import TritonOps
from lowlat.platform.cpu import CpuPlatform
from lowlat.platform.cuda import CudaLinear

GREEDY = SlotSampling(0.0, 0, 1.0, 0, -1)


class Graphs(RehearsedBodies):
    """As graphs, of which there are some."""

    captured = 1


def main() -> None:
    folder, by_rows = Path(sys.argv[1]), int(sys.argv[2])
    pack: Any = lambda self, weight_OI, bias_O=None: CudaLinear(weight_OI, bias_O)  # noqa: E731
    CpuPlatform.pack = pack  # type: ignore[method-assign]
    driver.set_active(NoDriver())
    launch: Any = jit.JITFunction.run
    jit.JITFunction.run = lambda *args, grid, warmup, **rest: launch(*args, grid=grid, warmup=True, **rest)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    # Kernels with few registers are for heads of more than 64.
    save_random(folder, "Qwen3", head_dim=16 if by_rows == 1 else 128)
    ops, size = TritonOps(4, early_start=True), EngineSize(max_batch=4)
    ops.one_row_attention = by_rows
    model = build(folder, dtype=torch.bfloat16)
    _, runner = make_runner(model, size, ops, bodies=Graphs())
    runner.prepare([SamplingMode()])
    runner.prepare_chunks(size.chunk_tokens)
    _first_step(runner)

    ready, numbers, decodes = cached(), itertools.count(2), []
    assert len(ready) > 20
    assert by_rows or 128 in limits("attend_kernel")
    for slot in range(size.max_batch):
        begins, pages = [(slot, GREEDY)], [(slot, 0, list(range(slot * 12, slot * 12 + 12)))]
        for start, last in ((0, False), (7, True)):
            chunk = PrefillChunk(slot, start, random_tokens(7, slot), last)
            runner.launch(StepPlan(next(numbers), begins, pages, [chunk], decodes))
            begins, pages = [], []
            assert cached() == ready, f"a chunk beside {len(decodes)} compiled {new(ready)}"
        decodes = [*decodes, slot]
        runner.launch(StepPlan(next(numbers), [], [], [], decodes))
        assert cached() == ready, f"{len(decodes)} requests compiled {new(ready)}"
    print(f"{len(ready)} kernels serve them")


def new(ready: set[str]) -> list[str]:
    return sorted(Path(path).stem for path in cached() - ready)


if __name__ == "__main__":
    main()
