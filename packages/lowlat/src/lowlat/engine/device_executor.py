"""The executor around a runner whose state lives on a device: steps are queued at once, and results read in order."""

from __future__ import annotations

from collections import deque

import torch

from lowlat.engine.batch import StepPlan
from lowlat.engine.device_results import PendingStep
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.executor import ExecutorError, StepResult


class DeviceExecutor:
    """Launches in the caller's thread, which costs it no wait, and reads results in order."""

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self._pending: deque[PendingStep] = deque()
        self._failure: Exception | None = None

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; an error comes with its result."""
        if self._failure is None:
            try:
                self._pending.append(self._runner.launch(plan))
            except Exception as error:
                self._failure = error

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest result; None after `timeout` seconds. Raises `ExecutorError`, and after it at every call."""
        try:
            if self._pending:
                result = self._pending[0].wait(timeout)
                if result is not None:
                    self._pending.popleft()
                return result
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            raise ExecutorError(f"{type(self._failure).__name__}: {self._failure}") from self._failure
        return None

    def close(self) -> None:
        """Let the steps in flight end."""
        if self._failure is not None:
            self._runner.host.communicator.stop()  # else they may wait for a lost rank
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        self._pending.clear()  # not before: kernels write their memory (decision 0715)
        if self._runner.host.communicator.shard.size > 1:
            self._runner.bodies.close()
