"""The Triton kernels of the general path against plain PyTorch, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements/triton.txt")


@pytest.mark.parametrize("file", ["interpreted_kernels.py"])
def test_kernels_under_the_interpreter(file):
    path = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", str(path)]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
