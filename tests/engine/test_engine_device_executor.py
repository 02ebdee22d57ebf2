"""The executor of a device's runner, and the steps that it has launched."""

from __future__ import annotations

import types
import weakref

import pytest
import torch

from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_results import PendingStep
from lowlat.engine.device_sampler import Samples
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


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_a_step_that_is_dropped_keeps_its_memory_until_it_has_ended(read: bool, lost: bool) -> None:
    """Not one whose result was read, which has ended; a device that failed is no reason to say more."""
    tokens = torch.zeros(1, dtype=torch.int64)
    memory, ended = weakref.ref(tokens), []

    class Event:
        def synchronize(self) -> None:
            ended.append(memory() is not None)
            if lost and not read:
                raise RuntimeError("CUDA error: a planted failure")

    step = PendingStep(0, Samples(tokens), [0], [-1], torch.device("cpu"), lambda _: None)
    step._event = Event()
    del tokens
    if read:
        assert step.wait() is not None
    before = len(ended)
    assert before == read
    del step
    assert len(ended) - before == (not read)
    assert all(ended)
    assert memory() is None


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_never_began_is_dropped_silently() -> None:
    with pytest.raises(AttributeError):
        PendingStep(0, None, [], [], None, lambda _: None)  # type: ignore[arg-type]
