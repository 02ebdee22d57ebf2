"""Tensor parallelism on GPUs: pushed sums, and whole engines beside one of one rank. Two GPUs at least."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_kit import KINDS, PROMPTS

from lowlat.offline import Engine, Generation

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"tensor parallelism needs two GPUs, and there are {GPUS}"),
]
SIZES = [size for size in (2, 4) if size <= GPUS]


@pytest.mark.parametrize(("ranks", "gpus"), [*((size, size) for size in SIZES), *([(4, 2)] if GPUS in (2, 3) else [])])
def test_pushed_sums(ranks, gpus, tmp_path):
    """Of four ranks also where there are two GPUs, each shared by two of them."""
    program = str(Path(__file__).with_name("push_rank.py"))
    where = [str(tmp_path), str(gpus)]
    commands = [[sys.executable, program, str(rank), str(ranks), *where] for rank in range(ranks)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    said = [run.communicate(timeout=120)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * ranks, "\n".join(said)
    assert all("part of sum" in text and "done" in text for text in said)


SETTINGS = {
    "device": "cuda", "max_batch": 4, "max_context": 256, "kv_tokens": 2048, "run_ahead": 2, "low_latency": "off",
}  # fmt: skip


def answers(path: Path, size: int, dtype: str) -> list[Generation]:
    with Engine(model=str(path), tensor_parallel=size, dtype=dtype, **SETTINGS) as engine:
        executor = engine._core.executor
        runner = (executor._rank0 if size > 1 else executor)._runner
        assert runner.bodies.captured > 0
        if size > 1:
            assert (type(runner.model.sums).__name__ == "PushSums") == (dtype == "bfloat16")
        got: list[Generation] = engine.generate(PROMPTS, KINDS)
        assert set(runner.fallbacks) == {"prompt log-probabilities"}
    return got


@pytest.mark.parametrize("ranks", SIZES)
def test_ranks_go_on_with_the_same_tokens_as_one(tiny, ranks):
    expected, got = answers(tiny, 1, "float32"), answers(tiny, ranks, "float32")
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@pytest.mark.parametrize("ranks", SIZES)
def test_pushed_sums_leave_the_model_as_it_was(tiny, ranks):
    """In bfloat16 sums of ranks round elsewhere: log-probabilities of first tokens stay near those of one rank."""
    expected, got = answers(tiny, 1, "bfloat16"), answers(tiny, ranks, "bfloat16")
    mine, theirs = ({entry.token_id: entry.logprob for entry in many[4].logprobs[0].top} for many in (got, expected))
    common = mine.keys() & theirs.keys()
    assert len(common) >= 2
    assert all(abs(mine[token] - theirs[token]) < 0.1 for token in common)
    again = answers(tiny, ranks, "bfloat16")
    assert [one.token_ids for one in again] == [one.token_ids for one in got], "the same bits every time"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("end", ["kill", "close"])
def test_how_an_engine_of_ranks_ends(tiny, dtype, end):
    """Whether the others wait in pushes or in NCCL: a killed rank is a named error, and the process ends as ever."""
    program = str(Path(__file__).with_name("lost_rank.py"))
    run = subprocess.run([sys.executable, program, str(tiny), dtype, end], capture_output=True, text=True, timeout=120)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert "done" in run.stdout
    assert "terminate called" not in said, said
    if end == "kill":
        error = next(line for line in run.stdout.splitlines() if line.startswith("the request's error"))
        assert re.search(r"ranks \[1\] ended unexpectedly|part of sum", error), said
