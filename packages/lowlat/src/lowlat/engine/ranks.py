"""The ranks of a tensor-parallel engine: starting them, feeding them plans, noticing when one is gone."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from lowlat.engine.batch import PlanLimits, StepPlan, decode_plan, encode_plan
from lowlat.engine.config import EngineConfig
from lowlat.engine.executor import Executor, ExecutorError, StepResult
from lowlat.parallel.group import TorchGroup
from lowlat.parallel.ring import PlanRing, RingError
from lowlat.parallel.shard import Shard

_LOOK_S = 0.25
"""How often a waiting rank 0 looks after the other ranks' processes."""


class RankGroup:
    """Ranks 1 and up, each a process of its own, and the folder where all meet."""

    def __init__(self, config: EngineConfig, folder: str, processes: list[subprocess.Popen[bytes]]) -> None:
        self.size = config.tensor_parallel
        self.timeout_s = config.watchdog_s / 2
        self._folder = folder
        self._processes = processes
        self._communicator: TorchGroup | None = None

    @classmethod
    def start(cls, config: EngineConfig) -> RankGroup:
        """Start the processes; they load their weights while rank 0 loads its own."""
        folder = tempfile.mkdtemp(prefix="lowlat-ranks-")
        text = msgspec.json.encode(config).decode()
        processes = []
        for rank in range(1, config.tensor_parallel):
            command = [sys.executable, "-m", "lowlat.engine.ranks", "--rank", str(rank), "--folder", folder]
            processes.append(subprocess.Popen([*command, "--config", text], stdin=subprocess.DEVNULL))
        return cls(config, folder, processes)

    def join(self) -> TorchGroup:
        """Meet the other ranks; returns rank 0's communicator."""
        self._communicator = join_group(self._folder, 0, self.size, self.timeout_s)
        return self._communicator

    def publish_ring(self, ring: PlanRing) -> None:
        """Tell the ranks the ring's name (written elsewhere and renamed, so that none reads half of it)."""
        path = Path(self._folder, "ring")
        path.with_suffix(".new").write_text(ring.name)
        path.with_suffix(".new").rename(path)

    def dead(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, process in enumerate(self._processes, start=1) if process.poll() is not None]

    def close(self) -> None:
        """End the processes, by force after five seconds, and remove the folder."""
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._communicator is not None:
            self._communicator.close()
        for path in Path(self._folder).iterdir():
            path.unlink()
        Path(self._folder).rmdir()


class TensorParallelExecutor:
    """Publishes each plan to the other ranks, then runs rank 0's part."""

    def __init__(self, rank0: Executor, group: RankGroup, limits: PlanLimits) -> None:
        self._rank0 = rank0
        self._group = group
        self._ring = PlanRing(limits.words, group.size - 1)
        self._decodes: list[int] | None = None
        group.publish_ring(self._ring)

    def launch(self, plan: StepPlan) -> None:
        """Queue a step on all ranks. Raises `ExecutorError` when a rank is gone or late."""

        def fill(record: np.ndarray) -> None:
            encode_plan(plan, record, self._decodes)

        try:
            self._ring.write(fill, self._group.timeout_s)
        except RingError as error:
            raise ExecutorError(str(error)) from error
        self._decodes = plan.decodes
        self._rank0.launch(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """Rank 0's result. Raises `ExecutorError` when a rank died."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_S if end is None else min(_LOOK_S, max(0.0, end - time.monotonic()))
            result = self._rank0.collect(left)
            if result is not None:
                return result
            if dead := self._group.dead():
                raise ExecutorError(f"ranks {dead} ended unexpectedly; their own messages are above")
            if end is not None and time.monotonic() >= end:
                return None

    def close(self) -> None:
        """End all ranks."""
        self._rank0.close()
        self._ring.close()
        self._group.close()


def join_group(folder: str, rank: int, size: int, timeout_s: float) -> TorchGroup:
    """Meet the ranks of a group in `folder`, over the loopback interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchGroup(Shard(rank, size), str(Path(folder, "rendezvous")), timeout_s=timeout_s)


def run_rank(config: EngineConfig, folder: str, rank: int) -> None:
    """Body of a rank's process: build, then run plans until the ring closes or rank 0 is gone."""
    from lowlat.engine.build import build_rank
    from lowlat.models.loading.checkpoint import open_checkpoint

    parent = os.getppid()
    communicator = join_group(folder, rank, config.tensor_parallel, config.watchdog_s / 2)
    parts = build_rank(config, open_checkpoint(config.model), communicator, lambda done, total, what: None)
    path = Path(folder, "ring")
    while not path.exists():
        if os.getppid() != parent:
            return
        time.sleep(0.01)
    ring = PlanRing(parts.limits.words, config.tensor_parallel - 1, path.read_text())
    decodes: list[int] | None = None
    while (record := ring.read(rank - 1, lambda: os.getppid() == parent)) is not None:
        plan = decode_plan(record, decodes)
        decodes = plan.decodes
        parts.runner.run(plan)
    ring.close()
    communicator.close()


def main() -> None:
    """Entry of a rank's process."""
    parser = argparse.ArgumentParser(description="one rank of a tensor-parallel engine; started by rank 0")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    try:
        run_rank(config, arguments.folder, arguments.rank)
    except Exception as error:
        # Rank 0 shows the cause; one line a rank is enough beside it.
        sys.exit(f"rank {arguments.rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


if __name__ == "__main__":
    main()
