"""What all tests share."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# The same examples in every ordinary run, so that a red run is about the change; `make soak` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("fresh", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, with a word."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-gpu` on a machine with one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
