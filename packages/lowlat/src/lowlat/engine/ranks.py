"""The ranks of a tensor-parallel engine: starting them, feeding them plans, noticing when one is gone."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from lowlat.engine.batch import PlanLimits, StepPlan, decode_plan, encode_plan
from lowlat.engine.config import EngineConfig
from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.executor import Executor, ExecutorError, StepResult
from lowlat.parallel.group import TorchGroup
from lowlat.parallel.ring import PlanRing, RingError
from lowlat.parallel.shard import Shard

if TYPE_CHECKING:
    from lowlat.engine.build import RankParts

_LOOK_S = 0.25
"""How often ranks look after each other's processes."""
_GRACE_S = 2.0
"""What a rank's process may take to end, from the moment when others see that it failed."""
RANK_PROGRAM: tuple[str, ...] = (sys.executable, "-m", "lowlat.engine.ranks")


class RankGroup:
    """Ranks 1 and up, each a process of its own, and the folder where all meet."""

    def __init__(self, config: EngineConfig, folder: str, processes: list[subprocess.Popen[bytes]]) -> None:
        self.size = config.tensor_parallel
        self.timeout_s = config.watchdog_s / 2
        self._folder = folder
        self._processes = processes
        self._communicator: TorchGroup | None = None
        self._device = config.device
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)

    @classmethod
    def start(cls, config: EngineConfig) -> RankGroup:
        """Start the processes; they load their weights while rank 0 loads its own."""
        folder = tempfile.mkdtemp(prefix="lowlat-ranks-")
        text = msgspec.json.encode(config).decode()
        processes = []
        for rank in range(1, config.tensor_parallel):
            command = [*RANK_PROGRAM, "--rank", str(rank), "--folder", folder]
            processes.append(subprocess.Popen([*command, "--config", text], stdin=subprocess.DEVNULL))
        return cls(config, folder, processes)

    def join(self) -> TorchGroup:
        """Meet the other ranks; returns rank 0's communicator."""
        self._communicator = join_group(self._folder, 0, self.size, self.timeout_s, self._device)
        self._watcher.start()
        return self._communicator

    def publish_ring(self, ring: PlanRing) -> None:
        """Tell the ranks the ring's name (written elsewhere and renamed, so that none reads half of it)."""
        path = Path(self._folder, "ring")
        path.with_suffix(".new").write_text(ring.name)
        path.with_suffix(".new").rename(path)

    def dead(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, process in enumerate(self._processes, start=1) if process.poll() is not None]

    def failure(self, grace_s: float = 0.0) -> str | None:
        """What became of the ranks that have ended, in their own words where they left any; None: none has ended
        within `grace_s` seconds."""
        end = time.monotonic() + grace_s
        while not (dead := self.dead()) and time.monotonic() < end:
            time.sleep(0.02)
        if not dead:
            return None
        words = [_last_words(self._folder, rank) for rank in dead]
        if found := [text for text in words if text is not None]:
            return "; ".join(found)
        return f"ranks {dead} ended unexpectedly; their own messages are above"

    def _watch(self) -> None:
        """Rank 0 may wait on its GPU for a rank that is gone: then nothing but this thread can end it."""
        while not self._closing.wait(_LOOK_S):
            if self.dead() and self._communicator is not None:
                self._communicator.stop()
                return

    def ending(self) -> None:
        """Ranks may end from now on."""
        self._closing.set()

    def close(self) -> None:
        """End the processes, by force after five seconds, and remove the folder."""
        self.ending()
        # Ranks leave NCCL together, so none of them would end before rank 0 leaves.
        if self._communicator is not None and self._device == "cuda":
            self._communicator.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._communicator is not None and self._device != "cuda":
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
            raise ExecutorError(self._group.failure() or str(error)) from error
        self._decodes = plan.decodes
        self._rank0.launch(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """Rank 0's result. Raises `ExecutorError` when a rank died."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LOOK_S if end is None else min(_LOOK_S, max(0.0, end - time.monotonic()))
            try:
                result = self._rank0.collect(left)
            except ExecutorError as error:
                # A rank that ended is why, if one has: what rank 0 sees of it says less.
                raise ExecutorError(self._group.failure(_GRACE_S) or str(error)) from error
            if result is not None:
                return result
            if failure := self._group.failure():
                raise ExecutorError(failure)
            if end is not None and time.monotonic() >= end:
                return None

    def close(self) -> None:
        """End all ranks."""
        self._group.ending()
        self._rank0.close()
        self._ring.close()
        self._group.close()


def join_group(folder: str, rank: int, size: int, timeout_s: float, device: str = "cpu") -> TorchGroup:
    """Meet the ranks of a group in `folder`, over the loopback interface; on GPUs, each takes the one of its number."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    return TorchGroup(Shard(rank, size), str(Path(folder, "rendezvous")), backend=backend, timeout_s=timeout_s)


def run_rank(config: EngineConfig, folder: str, rank: int) -> None:
    """Body of a rank's process: build, then run plans until the ring closes or rank 0 is gone."""
    from lowlat.engine.build import build_rank
    from lowlat.models.loading.checkpoint import open_checkpoint

    parent = os.getppid()

    def alive() -> bool:
        return os.getppid() == parent

    communicator = join_group(folder, rank, config.tensor_parallel, config.watchdog_s / 2, config.device)
    _end_with(alive, communicator)
    parts = build_rank(config, open_checkpoint(config.model), communicator, lambda done, total, what: None)
    path = Path(folder, "ring")
    while not path.exists():
        if not alive():
            return
        time.sleep(0.01)
    ring = PlanRing(parts.limits.words, config.tensor_parallel - 1, path.read_text())
    run = _runs_ahead(DeviceExecutor(parts.runner), config) if isinstance(parts.runner, DeviceRunner) else _runs(parts)
    with run as launch:
        decodes: list[int] | None = None
        while (record := ring.read(rank - 1, alive)) is not None:
            plan = decode_plan(record, decodes)
            decodes = plan.decodes
            launch(plan)
    ring.close()
    communicator.close()


@contextlib.contextmanager
def _runs(parts: RankParts) -> Iterator[Callable[[StepPlan], object]]:
    """Steps one after another."""
    yield parts.runner.run


@contextlib.contextmanager
def _runs_ahead(executor: Executor, config: EngineConfig) -> Iterator[Callable[[StepPlan], object]]:
    """Steps queued on the device, as many as rank 0 queues; their results are waited for, for their errors alone."""
    in_flight = 0

    def launch(plan: StepPlan) -> None:
        nonlocal in_flight
        executor.launch(plan)
        in_flight += 1
        while in_flight > config.run_ahead:
            in_flight -= executor.collect(None) is not None

    try:
        yield launch
    finally:
        executor.close()


def _end_with(alive: Callable[[], bool], communicator: TorchGroup) -> None:
    """End this process soon after rank 0, also while it waits for its GPU."""

    def watch() -> None:
        while alive():
            time.sleep(_LOOK_S)
        communicator.stop()
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _last_words(folder: str, rank: int) -> str | None:
    path = Path(folder, f"error-{rank}")
    return path.read_text() if path.exists() else None


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
        text = f"rank {arguments.rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        path = Path(arguments.folder, f"error-{arguments.rank}")
        with contextlib.suppress(OSError):  # rank 0 may have removed the folder
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").rename(path)
        print(text, file=sys.stderr, flush=True)
        # Not by way of the interpreter's end, where libraries may wait for ranks that are gone.
        os._exit(1)


if __name__ == "__main__":
    main()
