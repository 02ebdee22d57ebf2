"""benchmarks/gpu_round.py: who shares a GPU, what is left out, and that nothing outlives its limit."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("gpu_round", ROOT / "benchmarks" / "gpu_round.py")
assert SPEC is not None
assert SPEC.loader is not None
gpu_round: Any = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_round"] = gpu_round
SPEC.loader.exec_module(gpu_round)
Job = gpu_round.Job


def play(out: Path, jobs: list[Any], gpus: int = 1, budget: float = 900.0) -> dict[str, Any]:
    outcomes = gpu_round.Round([str(gpu) for gpu in range(gpus)], budget, out).run(jobs)
    assert msgspec.json.decode((out / "summary.json").read_bytes(), type=list[gpu_round.Outcome]) == outcomes
    return {outcome.name: outcome for outcome in outcomes}


def script(text: str) -> str:
    return f"python -c {shlex.quote(text)}"


def test_outcomes_logs_and_the_gpu_that_a_job_sees(tmp_path: Path) -> None:
    sees = script("import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1])")
    jobs = [
        Job("good", f"{sees} {{out}}/result", 1),
        Job("bad", script("import sys; print('no luck'); sys.exit(3)"), 1),
        Job("wide", "true", 1, gpus=2),
        Job("wanting", "true", 1, needs=("NO_SUCH_VARIABLE",)),
        Job("long", "true", 1000),
    ]
    found = play(tmp_path, jobs)
    assert {name: outcome.state for name, outcome in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "wide": "left out",
        "wanting": "left out",
        "long": "left out",
    }
    assert (tmp_path / "good.log").read_text() == f"0 {tmp_path}/result\n"
    assert (tmp_path / "bad.log").read_text() == "no luck\n"
    assert found["bad"].why == "exit status 3"
    assert found["wide"].why == "needs 2 GPUs, there are 1"
    assert found["wanting"].why == "NO_SUCH_VARIABLE is not set"
    assert found["long"].why.startswith("takes 1000 s")


def test_a_job_whose_tests_are_all_skipped_has_failed(tmp_path: Path) -> None:
    skipped = "import pytest\n\n\ndef test_it(): pytest.skip('1 passed by')\n"
    (tmp_path / "test_none.py").write_text(skipped)
    (tmp_path / "test_some.py").write_text(f"{skipped}\n\ndef test_that(): pass\n")
    tests = "python -m pytest -q -rs -p no:cacheprovider --rootdir {folder} {folder}/test_"
    jobs = [Job(name, f"{tests}{name}.py".replace("{folder}", str(tmp_path)), 60) for name in ("none", "some")]
    found = play(tmp_path / "out", jobs)
    assert {name: (outcome.state, outcome.why) for name, outcome in found.items()} == {
        "none": ("failed", "no test ran"), "some": ("passed", ""),
    }  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2])
def test_timed_jobs_have_a_gpu_alone(tmp_path: Path, gpus: int) -> None:
    nap = script("import time; time.sleep(0.4)")
    jobs = [Job(f"job{n}", nap, 1, timed=n % 3 == 1, gpus=2 if gpus == 2 and n == 4 else 1) for n in range(8)]
    found = play(tmp_path, jobs, gpus)
    assert {outcome.state for outcome in found.values()} == {"passed"}
    met = 0
    for one, other in itertools.combinations(jobs, 2):
        first, second = found[one.name], found[other.name]
        if first.began < second.ended and second.began < first.ended and set(first.gpus) & set(second.gpus):
            met += 1
            assert not one.timed
            assert not other.timed
    assert met > 0, "jobs that are not timed share a GPU"
    assert len(found["job4"].gpus) == gpus


def test_a_job_is_ended_at_its_limit_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "limit", property(lambda job: job.seconds))
    jobs = [Job("leaves", "sh -c 'sleep 600 & echo $!'", 60), Job("hangs", "sh -c 'sleep 600 & echo $!; wait'", 8)]
    found = play(tmp_path, jobs, budget=120)
    assert found["leaves"].state == "passed"
    assert found["hangs"].state == "overtime"
    for name in ("leaves", "hangs"):
        child = int((tmp_path / f"{name}.log").read_text())
        for _ in range(6000):
            if not alive(child):
                break
            time.sleep(0.02)
        assert not alive(child)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # An ended process stays in the table until whoever adopted it has looked.
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_list_names_what_there_is() -> None:
    jobs = gpu_round.read_jobs(ROOT / "benchmarks" / "gpu_round.toml")
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = shlex.split(job.command)
        assert words[0] in ("python", "lowlat")
        paths = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
        assert paths or words[:2] == ["lowlat", "bench"]
        for path in paths:
            assert (ROOT / path).exists(), f"{job.name}: {path}"
    listed = " ".join(job.command for job in jobs)
    for path in [*ROOT.glob("tests/gpu/test_*.py"), *ROOT.glob("tests/nvidia/test_*_gpu.py")]:
        folder = "tests/nvidia -m gpu" if "nvidia" in path.name and path.parent.name == "nvidia" else None
        assert path.name in listed or (folder and folder in listed), f"no job runs {path.name}"


def test_a_wrong_list_or_name_is_told(tmp_path: Path) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text("[[jobs]]\nname = 'a'\ncommand = 'true'\nseconds = 1\nspeed = 2\n")
    with pytest.raises(SystemExit, match="speed"):
        gpu_round.read_jobs(path)
    path.write_text("[[jobs]]\nname = 'a'\ncommand = 'true'\nseconds = 1\n")
    with pytest.raises(SystemExit, match="no job is called b; there are a"):
        gpu_round.read_jobs(path, ["a", "b"])
