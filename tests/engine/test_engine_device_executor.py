"""The executor of a device's runner."""

from __future__ import annotations

import types
import weakref

import pytest
import torch

from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_results import PendingStep
from lowlat.engine.executor import ExecutorError, StepResult


@pytest.mark.parametrize("fails", [False, True])
def test_steps_in_flight_are_kept_until_they_have_ended(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Kernels write the memory that their results come in."""
    flying: list[weakref.ref[PendingStep]] = []

    def launch(plan: int) -> PendingStep:
        if fails and plan == 2:
            raise RuntimeError("a planted failure")
        step = PendingStep.finished(StepResult(plan, []))
        flying.append(weakref.ref(step))
        return step

    ended: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: ended.extend(step() is not None for step in flying))
    communicator = types.SimpleNamespace(stop=lambda: None, shard=types.SimpleNamespace(size=1))
    host = types.SimpleNamespace(communicator=communicator)
    runner = types.SimpleNamespace(launch=launch, device=torch.device("cuda"), host=host)
    executor = DeviceExecutor(runner)  # type: ignore[arg-type]
    for plan in range(3):
        executor.launch(plan)  # type: ignore[arg-type]
    executor.close()
    assert ended == [True] * len(flying)
    assert all(step() is None for step in flying)
    assert len(flying) == 3 - fails
    if fails:
        with pytest.raises(ExecutorError, match="a planted failure"):
            executor.collect(0)
