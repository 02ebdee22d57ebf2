"""What all tests share."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples in every ordinary run, so that a red run is about the change; `make soak` draws new ones. How long
# an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("untimed"), derandomize=True)
settings.register_profile("fresh", settings.get_profile("untimed"), print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, with a word."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test-gpu` on a machine with one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The same random numbers for a test and the fixtures made for it, whatever ran in its process before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _log_lines_go_to_pytest() -> Iterator[None]:
    """A handler that a test leaves behind writes to a stream that is closed by then, for all tests to come."""
    yield
    for name in ("lowlat", "uvicorn"):
        assert logging.getLogger(name).propagate, "set_up_logging was called in the tests' own process"
