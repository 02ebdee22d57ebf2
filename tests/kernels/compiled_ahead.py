"""Compiles the kernels of a tiny model's steps for a GPU that is not here, after a rehearsal of them.

test_kernels_compile.py runs this in a process of its own: Triton is told of a GPU for the rest of the process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

sys.path.append(str(Path(__file__).parents[1] / "models"))

from device_kit import EngineSize, make_runner
from family_kit import build, save_random

from lowlat.engine import row_kernels
from lowlat.engine.device_sampler import SamplingMode
from lowlat.layers.triton.ahead import compile_all, rehearsal
from lowlat.layers.triton_ops import EVERY, TritonOps


class NoDriver:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def cached() -> set[str]:
    return {str(path) for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}


def limits(kernel: str) -> set[int | None]:
    """Of registers, by which it was compiled."""
    found = Path(os.environ["TRITON_CACHE_DIR"]).rglob(f"{kernel}.json")
    return {json.loads(path.read_text())["maxnreg"] for path in found}


def check_choice(runner: Any) -> None:
    """What the start tries of attention is compiled first, both ways."""
    before, ops = cached(), runner.model.ops
    with torch.inference_mode():
        wanted = {
            "one_row_attention": row_kernels.attention_chains(runner.model, runner.kv, 4, 1),
            "row_attention": row_kernels.attention_chains(runner.model, runner.kv, 2, 3),
        }
        assert all(len(groups) > 1 for groups in wanted.values())
        row_kernels._compile(wanted, ops, torch.device("cpu"))
        compiled = cached()
        names = {Path(path).stem for path in compiled - before}
        assert {"row_attend_kernel", "join_kernel", "attend_kernel", "combine_kernel"} <= names
        assert limits("attend_kernel") == {None, 128}, "one request and several have kernels of their own"
        assert limits("row_attend_kernel") == {None}
        for name, groups in wanted.items():
            for ours in (0, EVERY):
                setattr(ops, name, ours)
                for chain in itertools.chain(*groups):
                    chain.run()
    assert cached() == compiled


def main() -> None:
    folder = Path(sys.argv[1])
    driver.set_active(NoDriver())
    save_random(folder, "Qwen3", head_dim=128, num_hidden_layers=5)
    _, runner = make_runner(
        build(folder, dtype=torch.bfloat16), EngineSize(max_batch=4), TritonOps(4, early_start=True)
    )
    mode = SamplingMode(draws=True, filters=True)

    def steps() -> None:
        with torch.inference_mode():
            for size in (2, 1):
                runner._lists.pad(size)
                for one in (SamplingMode(), mode):
                    runner.decodes.body(size, one, 1)[1]()
            runner.prepare_chunks(16)

    with runner.model.few_layers(), rehearsal() as found:
        steps()
    assert not cached()
    compile_all(found, torch.device("cpu"))
    compiled = cached()
    assert 15 < len(compiled) <= len(found)

    # What is launched later, by all layers, finds each of them; without a GPU nothing is launched.
    launch: Any = jit.JITFunction.run
    jit.JITFunction.run = lambda *args, grid, warmup, **rest: launch(*args, grid=grid, warmup=True, **rest)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    steps()
    assert cached() == compiled
    check_choice(runner)
    print(f"{len(compiled)} compiled with triton {triton.__version__}")


if __name__ == "__main__":
    main()
