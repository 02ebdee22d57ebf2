"""Fixtures of the loading tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llama import TinyLlama, write


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray[Any, Any]]]]:
    """Makes a tiny GGUF file from `TinyLlama`'s fields; returns its path and values."""

    def make(**fields: Any) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
        path = tmp_path / "tiny.gguf"
        return path, write(path, TinyLlama(**fields))

    return make


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own."""
    monkeypatch.setenv("LOWLAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
