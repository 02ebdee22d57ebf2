"""The dense step for a long time, and under the eyes of compute-sanitizer. Needs a Hopper GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.cases import make_case
from lowlat_nvidia.dense.reference import random_weights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.step import DenseStep

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

STEPS = 10_000
SHAPES = {
    "heads of 64": plans.DenseShape(4, 2048, 32, 8, 64, 2048, 3001, False),
    "query norms": plans.DenseShape(5, 1024, 16, 8, 128, 3072, 5003, True, 1e-6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_ten_thousand_steps_repeat_bit_for_bit(name: str) -> None:
    """Steps of one and of seven rows in turn; every step's logits, keys and values are compared on the device."""
    shape = SHAPES[name]
    rotary = rotary_table(frequencies({}, shape.head_dim), 4096, "cuda")
    step = DenseStep(plans.DensePlan(shape), random_weights(shape, 1, "cuda"), rotary)
    cases = [make_case(shape, positions, 16, 4) for positions in ([[700]], [[30], [1500, 1501, 1502], [9], [0], [64]])]
    expected = []
    for inputs, pools in cases:
        step.bind(pools, 16)
        logits = step.run(inputs).clone()
        expected.append((logits, [pool.clone() for pair in pools for pool in pair]))
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(STEPS):
        (inputs, pools), (logits, kv) = cases[turn % 2], expected[turn % 2]
        step.bind(pools, 16)
        differ += (step.run(inputs) != logits).any()
        if turn % 1000 < 2:
            flat = [pool for pair in pools for pool in pair]
            differ += sum((mine != theirs).any().long() for mine, theirs in zip(flat, kv, strict=True))
    step.check()
    assert int(differ) == 0, f"{int(differ)} of {STEPS} steps differ"


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        pytest.skip("compute-sanitizer is not installed")
    return found


def watched(tool: str, *arguments: str) -> str:
    """What compute-sanitizer says of steps of one and of five rows."""
    program = [sys.executable, str(Path(__file__).with_name("dense_small.py")), *arguments, "1", "5"]
    # The bindings look up functions that an older driver lacks: those calls fail by design.
    options = ["--tool", tool, "--report-api-errors", "no", "--kernel-name", "kernel_substring=dense_step"]
    env = os.environ | {"LOWLAT_NVRTC_OPTIONS": "--generate-line-info"}
    done = subprocess.run([sanitizer(), *options, *program], capture_output=True, text=True, timeout=600, env=env)
    assert "5 16 [" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_memcheck_finds_nothing() -> None:
    said = watched("memcheck")
    assert "ERROR SUMMARY: 0 errors" in said, said[-4000:]


def test_racecheck_finds_nothing_where_every_lane_arrives() -> None:
    said = watched("racecheck", "plain")
    assert "RACECHECK SUMMARY: 0 hazards" in said, said[-4000:]


def test_racecheck_doubts_one_lane_that_arrives_for_its_warp(tmp_path: Path) -> None:
    """Of an ordinary build it doubts the cache's copies alone; and so it does of two warps that do nothing else."""
    said = watched("racecheck")
    reported = re.findall(r"Race reported between (.*)", said)
    known = ("load_shared", "load_transposed", "copy_async")
    others = [line for line in reported if not any(name in line for name in known)]
    assert not others, said[-4000:]
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    for one in (0, 1):
        program = tmp_path / f"program{one}"
        source = Path(__file__).with_name("one_lane_arrives.cu")
        subprocess.run([nvcc, "-arch=sm_90a", "-lineinfo", f"-DONE={one}", source, "-o", program], check=True)
        done = subprocess.run([sanitizer(), "--tool", "racecheck", program], capture_output=True, text=True, timeout=60)
        assert "sum 1144 no error" in done.stdout
        assert ("Race reported" in done.stdout) == bool(one), done.stdout
