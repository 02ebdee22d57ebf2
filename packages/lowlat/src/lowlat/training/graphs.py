"""Steps of a training as CUDA graphs, one for each shape of what is learnt from: a step is a thousand small kernels,
whose launches take longer than they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowlat.training.target import Written

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Learn = Callable[[Written, torch.Tensor, float], Found]
"""(sequences, anchors [S, A], part of acceptance in the loss) to what is told of a step; all on the device."""


class _Captured:
    """One graph, what it reads, and what it tells."""

    def __init__(
        self,
        learn: Learn,
        written: Written,
        anchors_SA: torch.Tensor,
        accepting: float,
        where: tuple[Any, torch.cuda.Stream],
    ) -> None:
        """`where`: memory pool and stream of the capture."""
        parts = [part.clone() if isinstance(part, torch.Tensor) else part for part in written]
        self._written, self._anchors_SA = Written._make(parts), anchors_SA.clone()
        self._graph = torch.cuda.CUDAGraph()
        pool, stream = where
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._found = learn(self._written, self._anchors_SA, accepting)

    def run(self, written: Written, anchors_SA: torch.Tensor) -> Found:
        for mine, new in zip(self._written, written, strict=True):
            if isinstance(mine, torch.Tensor) and isinstance(new, torch.Tensor):
                mine.copy_(new)
        self._anchors_SA.copy_(anchors_SA)
        self._graph.replay()
        return self._found


class StepGraphs:
    """Each shape's first step runs as it is, its second is captured."""

    def __init__(self, learn: Learn) -> None:
        self._learn = learn
        self._captured: dict[tuple[object, ...], _Captured | None] = {}
        self._where = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, written: Written, anchors_SA: torch.Tensor, accepting: float) -> Found:
        """As `Learn`; what it returns is good until the next step."""
        key = (written.features_STX.shape, written.prompt_tokens, anchors_SA.shape, accepting)
        if key not in self._captured:
            self._captured[key] = None
            return self._plain(written, anchors_SA, accepting)
        captured = self._captured[key]
        if captured is None:
            captured = _Captured(self._learn, written, anchors_SA, accepting, self._where)
            self._captured[key] = captured
        return captured.run(written, anchors_SA)

    def _plain(self, written: Written, anchors_SA: torch.Tensor, accepting: float) -> Found:
        """On the stream of captures: what autograd keeps of a parameter belongs to the stream that it was used on."""
        here, stream = torch.cuda.current_stream(), self._where[1]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found = self._learn(written, anchors_SA, accepting)
        here.wait_stream(stream)
        return found
