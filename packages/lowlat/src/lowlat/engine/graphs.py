"""Decode steps as CUDA graphs, one for each kind of step and padded number of requests.

The bodies run eagerly in ordinary tests, on a CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Body = Callable[[], Any]
"""Work on tensors that stay where they are. It returns tensors, which the next run of the same kind may write again:
who wants to keep them copies them on the same stream before."""


class StepBodies(Protocol):
    """How bodies run."""

    @property
    def captured(self) -> int:
        """Graphs that exist."""

    def knows(self, key: Hashable) -> bool:
        """Whether nothing is left to prepare for this kind of step."""

    def prepare(self, key: Hashable, body: Body) -> None:
        """Make ready to run `body` as `key`; runs it a few times, so its inputs must be padding now."""

    def run(self, key: Hashable, body: Body) -> Any:
        """Run the body; returns its outputs."""

    def close(self) -> None:
        """Let go of what was prepared; nothing may be running."""


class EagerBodies:
    """Runs bodies as they are: on CPUs, and on GPUs for models that ask the host something in a step."""

    captured = 0

    def knows(self, key: Hashable) -> bool:
        """Always."""
        return True

    def prepare(self, key: Hashable, body: Body) -> None:
        """Nothing to do."""

    def run(self, key: Hashable, body: Body) -> Any:
        """Call it."""
        return body()

    def close(self) -> None:
        """Nothing to let go of."""


class CudaGraphs:
    """Captures each kind of step once and replays it. All graphs share one memory pool: they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._rehearses = False

    @contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Inside, what is prepared only runs once, and is captured when it is prepared again."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    @property
    def captured(self) -> int:
        """Graphs that exist."""
        return len(self._graphs)

    def knows(self, key: Hashable) -> bool:
        """Whether this kind of step was captured."""
        return key in self._graphs

    def prepare(self, key: Hashable, body: Body) -> None:
        """Run `body` on a side stream, so that kernels are compiled and memory is there, then capture it."""
        if self._rehearses:
            body()
            return
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile: NCCL has one that asks for events all the time.
        # torch.cuda.graph would collect garbage and empty caches each time: half a second for a model's graphs.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._side):
                body()
                self._side.synchronize()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = body()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        current.wait_stream(self._side)
        self._graphs[key] = (graph, outputs)

    def run(self, key: Hashable, body: Body) -> Any:
        """Replay."""
        graph, outputs = self._graphs[key]
        graph.replay()
        return outputs

    def close(self) -> None:
        """Free the graphs: NCCL waits for those that hold its kernels before it leaves a group."""
        self._graphs.clear()
