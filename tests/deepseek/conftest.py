"""Makes the NumPy reference importable here, and tiny checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from lowlat.models.deepseek_v4.make_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny-v41 checkpoint."""
    path = tmp_path_factory.mktemp("deepseek") / "tiny-v41"
    make_checkpoint("tiny-v41", path, seed=0)
    return path


@pytest.fixture(scope="session")
def tiny_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny-v4 checkpoint."""
    path = tmp_path_factory.mktemp("deepseek") / "tiny-v4"
    make_checkpoint("tiny-v4", path, seed=1)
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
