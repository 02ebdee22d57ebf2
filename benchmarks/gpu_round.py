"""What a GPU must still show, in one go: tests and benchmarks of a list, side by side where that disturbs nothing.

A GPU is often lent by the minute. The list (gpu_round.toml beside this file) says of each job what it runs, how long
that took, and whether it is timed. Jobs run in the list's order: tests share a GPU, a timed job has one alone, and a
job that no longer fits into the budget is left out, with a word. Every job has a log and a limit, at which it is ended
with all its children; the summary on disk is whole after each.

    python benchmarks/gpu_round.py --list
    python benchmarks/gpu_round.py --budget 500 --out /tmp/round
    python benchmarks/gpu_round.py --only dense,speculation --gpus 0,1 --out /tmp/round
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

SHARED = 4
"""Jobs that are not timed and share a GPU; with ten at once each took more than twice as long."""
POLL = 0.2
"""Seconds between looks at running jobs."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command of the list."""

    name: str
    command: str
    """`python` is the one that runs this, and `{out}` the folder of logs."""
    seconds: float
    """How long it took when it last ran; an estimate where `note` says so."""
    timed: bool = False
    """Whether it measures times, so that nothing else may use its GPUs."""
    gpus: int = 1
    needs: tuple[str, ...] = ()
    """Environment variables without which it can do nothing."""
    note: str = ""

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 2 * self.seconds + 30


class Outcome(msgspec.Struct):
    """What became of a job; times in seconds since the round began."""

    name: str
    state: str
    """passed, failed, overtime or left out."""
    why: str = ""
    gpus: tuple[str, ...] = ()
    began: float = 0.0
    ended: float = 0.0


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: tuple[str, ...]
    began: float
    limit: float
    log: IO[bytes]


def read_jobs(path: Path, only: list[str] | None = None) -> list[Job]:
    """The list's jobs, in order.

    Raises:
        SystemExit: for a file that is no such list, and for names that are not in it.
    """
    try:
        jobs = msgspec.convert(tomllib.loads(path.read_text())["jobs"], list[Job])
    except (OSError, KeyError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        sys.exit(f"{path} is no list of jobs: {error}")
    unknown = set(only or []) - {job.name for job in jobs}
    if unknown:
        sys.exit(f"no job is called {', '.join(sorted(unknown))}; there are {', '.join(job.name for job in jobs)}")
    return [job for job in jobs if only is None or job.name in only]


class Round:
    """Runs jobs on GPUs until all have an outcome."""

    def __init__(self, gpus: list[str], budget: float, out: Path) -> None:
        self.gpus, self.budget, self.out = gpus, budget, out
        self.begin = time.monotonic()
        self.running: list[Running] = []
        self.outcomes: list[Outcome] = []
        out.mkdir(parents=True, exist_ok=True)

    def run(self, jobs: list[Job]) -> list[Outcome]:
        """Every job's outcome, in the order in which they ended."""
        waiting = list(jobs)
        try:
            while waiting or self.running:
                while waiting and self._begin(waiting[0]):
                    waiting.pop(0)
                time.sleep(POLL)
                self._look()
        finally:
            for one in list(self.running):
                self._end(one, "overtime", "the round was stopped")
        return self.outcomes

    def _now(self) -> float:
        return time.monotonic() - self.begin

    def _begin(self, job: Job) -> bool:
        """Start a job, or leave it out; False while its GPUs are busy."""
        left = self.budget - self._now()
        missing = [name for name in job.needs if name not in os.environ]
        if missing:
            self._leave_out(job, f"{', '.join(missing)} is not set")
        elif job.gpus > len(self.gpus):
            self._leave_out(job, f"needs {job.gpus} GPUs, there are {len(self.gpus)}")
        elif job.seconds > left:
            self._leave_out(job, f"takes {job.seconds:.0f} s, {max(left, 0):.0f} s are left")
        else:
            free = [gpu for gpu in self.gpus if self._has_room(gpu, job)]
            if len(free) < job.gpus:
                return False
            chosen = sorted(free, key=self._load)[: job.gpus]
            self._start(job, tuple(chosen), min(job.limit, left))
        return True

    def _load(self, gpu: str) -> int:
        return sum(gpu in one.gpus for one in self.running)

    def _has_room(self, gpu: str, job: Job) -> bool:
        beside = [one.job for one in self.running if gpu in one.gpus]
        if job.timed or any(other.timed for other in beside):
            return not beside
        return len(beside) < SHARED

    def _start(self, job: Job, gpus: tuple[str, ...], limit: float) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
        log = (self.out / f"{job.name}.log").open("wb")
        command = [part.replace("{out}", str(self.out)) for part in shlex.split(job.command)]
        if command[0] == "python":
            command[0] = sys.executable
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        print(f"{self._now():6.0f} s  {job.name} begins on GPU {', '.join(gpus)}", flush=True)
        self.running.append(Running(job, process, gpus, self._now(), limit, log))

    def _look(self) -> None:
        for one in list(self.running):
            status = one.process.poll()
            if status is not None:
                why = f"exit status {status}" if status else "no test ran" if self._tested_nothing(one.job) else ""
                self._end(one, "failed" if why else "passed", why)
            elif self._now() - one.began > one.limit:
                self._end(one, "overtime", f"ended after {one.limit:.0f} s")

    def _tested_nothing(self, job: Job) -> bool:
        """Whether all of a job's tests were skipped, which pytest takes for a success: its last line counts them."""
        if "pytest" not in shlex.split(job.command):
            return False
        text = (self.out / f"{job.name}.log").read_text(errors="replace")
        return " passed" not in text.rstrip().rpartition("\n")[2]

    def _end(self, one: Running, state: str, why: str) -> None:
        # Children outlive a process that ends on its own too: a server that a failed benchmark leaves holds the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.log.close()
        self.running.remove(one)
        self._record(Outcome(one.job.name, state, why, one.gpus, one.began, self._now()))

    def _leave_out(self, job: Job, why: str) -> None:
        self._record(Outcome(job.name, "left out", why, began=self._now(), ended=self._now()))

    def _record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        took = outcome.ended - outcome.began
        print(f"{self._now():6.0f} s  {outcome.name} {outcome.state} after {took:.0f} s {outcome.why}", flush=True)
        draft = self.out / "summary.json.new"
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self.outcomes)))
        draft.replace(self.out / "summary.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, default=Path(__file__).with_suffix(".toml"), help="the list")
    parser.add_argument("--list", action="store_true", help="print the list and end")
    parser.add_argument("--only", help="names of jobs, with commas between")
    parser.add_argument("--gpus", default="0", help="numbers of the GPUs to use, with commas between")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="folder of logs and summary.json")
    arguments = parser.parse_args()
    jobs = read_jobs(arguments.jobs, arguments.only.split(",") if arguments.only else None)
    if arguments.list:
        for job in jobs:
            kind = "timed" if job.timed else "shared"
            print(f"{job.name:24} {job.seconds:5.0f} s  {job.gpus} GPU  {kind:6}  {job.command}  {job.note}".rstrip())
        return
    if arguments.out is None:
        parser.error("--out FOLDER: where logs and the summary go")
    outcomes = Round(arguments.gpus.split(","), arguments.budget, arguments.out).run(jobs)
    bad = [outcome for outcome in outcomes if outcome.state != "passed"]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} passed; logs and summary.json are in {arguments.out}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
