"""Tensor parallelism on GPUs: pushed sums, and whole engines beside one of one rank. Two GPUs at least."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"tensor parallelism needs two GPUs, and there are {GPUS}"),
]
SIZES = [size for size in (2, 4) if size <= GPUS]


@pytest.mark.parametrize("ranks", SIZES)
def test_pushed_sums(ranks, tmp_path):
    program = str(Path(__file__).with_name("push_rank.py"))
    commands = [[sys.executable, program, str(rank), str(ranks), str(tmp_path)] for rank in range(ranks)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    said = [run.communicate(timeout=120)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * ranks, "\n".join(said)
    assert all("part of sum" in text and "done" in text for text in said)
