"""The Triton kernels of the general path against plain PyTorch, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements/triton.txt")


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("interpreted_kernels.py", "test"),
        ("interpreted_verify.py", "test"),
        ("interpreted_rows.py", "test"),
        ("interpreted_row_attention.py", "test"),
        ("interpreted_training.py", "test"),
        ("interpreted_models.py", "Gemma3"),  # windows, four norms a layer, QK-norm, a scaled embedding
        pytest.param("interpreted_models.py", "test", marks=pytest.mark.slow),
    ],
)
def test_under_the_interpreter(file, chosen):
    path = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", "-k", chosen, str(path)]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=3600, check=False
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
