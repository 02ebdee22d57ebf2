"""The dense step for a long time, and under the eyes of compute-sanitizer. Needs a Hopper GPU."""

from __future__ import annotations

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
    "heads of 64": plans.DenseShape(2, 2048, 32, 8, 64, 2048, 3001, False),
    "query norms": plans.DenseShape(3, 1024, 16, 8, 128, 3072, 5003, True, 1e-6),
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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    monkeypatch.setenv("LOWLAT_NVRTC_OPTIONS", "--generate-line-info")
    program = Path(__file__).with_name("dense_small.py")
    command = [sanitizer, "--tool", tool, "--kernel-regex", "kns=dense_step", sys.executable, str(program), "1", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "RACECHECK SUMMARY: 0 hazards" in done.stdout, (
        done.stdout[-4000:] + done.stderr[-2000:]
    )
    assert done.returncode == 0
    assert "5 16 [" in done.stdout, "the steps ran"
