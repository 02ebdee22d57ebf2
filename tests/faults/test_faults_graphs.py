"""Faults of graphs, as far as a CPU shows them: bodies may read only what was there when they were captured."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from device_kit import EngineSize, answer, make_engine, reference_ops
from family_kit import build, save_random
from test_models_device import check_same, requests
from test_models_device_replay import AnyLengthOps, Replays
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lowlat.engine.device_sampler import Samples
from lowlat.engine.graphs import Body


class Trace(TorchDispatchMode):
    """Every operation of a body: its numbers, the shapes of its tensors, and where those lie that it did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.paused = False
        self._alive: list[torch.Tensor] = []
        """So that no later tensor gets an earlier one's place."""
        self._given: set[int] = set()
        self._made: set[int] = set()

    def note(self, name: str, arguments: Any) -> None:
        def described(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            self._alive.append(value)
            place = _place(value)
            if place in self._made:
                return ("made here", tuple(value.shape), value.dtype)
            self._given.add(place)
            return (place, tuple(value.shape), value.dtype)

        self.operations.append((name, str(tree_map(described, arguments))))

    def made(self, results: Any) -> None:
        """Results are new, unless they are views of what was given, or were written in place."""

        def keep(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                self._alive.append(value)
                if _place(value) not in self._given:
                    self._made.add(_place(value))

        tree_map(keep, results)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            self.note(func.name(), (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self.made(result)
        return result


def _place(tensor: torch.Tensor) -> int:
    """Packed weights have no storage that can be asked."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class TracedReplays(Replays):
    """Each run of a body must do, operation by operation, what it did at capture, on the same outer tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: dict[Hashable, Trace] = {}
        self.current: Trace | None = None

    def _traced(self, body: Body) -> tuple[Trace, Samples]:
        self.current = Trace()
        with self.current as trace:
            result = body()
        self.current = None
        return trace, result

    def prepare(self, key: Hashable, body: Body) -> None:
        super().prepare(key, body)
        self.traces[key], _ = self._traced(body)
        kept, outputs = self._kept[key]

        def checked() -> Samples:
            trace, samples = self._traced(kept)
            for now, then in zip(trace.operations, self.traces[key].operations, strict=True):
                assert now == then, "a replay would not do this"
            return samples

        self._kept[key] = (checked, outputs)


class TracedOps(AnyLengthOps):
    """Attention counts as one operation on the tensors that it is given: kernels read the lengths on the device."""

    def __init__(self, bodies: TracedReplays) -> None:
        self._bodies = bodies

    def attend(self, q_RND: Any, keys_SKD: Any, values_SKD: Any, step: Any, rule: Any) -> torch.Tensor:
        trace = self._bodies.current
        if trace is None:
            return super().attend(q_RND, keys_SKD, values_SKD, step, rule)
        segments = [(one.slots_B, one.first_B, one.rows_B, one.lengths_B) for one in step.segments]
        trace.note("attend", (q_RND, keys_SKD, values_SKD, step.table_TP, segments))
        trace.paused = True
        result = super().attend(q_RND, keys_SKD, values_SKD, step, rule)
        trace.paused = False
        trace.made(result)
        return result


def test_a48_a_replay_does_what_was_captured_on_tensors_that_stay(tmp_path: Path):
    """Lengths, order, sampling and the pressure on memory change; the tokens are those without graphs."""
    save_random(tmp_path, "Qwen3", head_dim=16)
    model = build(tmp_path)
    replays = TracedReplays()
    mine = answer(make_engine(model, EngineSize(), 2, ops=TracedOps(replays), bodies=replays), requests())
    theirs = answer(make_engine(model, EngineSize(), 2, ops=reference_ops()), requests())
    check_same(mine, theirs)
    assert replays.captured > 3
    assert replays.runs > 30
    operations = [operation for trace in replays.traces.values() for operation in trace.operations]
    assert sum(name == "attend" for name, _ in operations) == 3 * replays.captured, "one a layer"
    assert len(operations) > 50 * replays.captured
