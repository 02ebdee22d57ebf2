"""Steps of a training as CUDA graphs, one for each aim: a step is hundreds of small kernels, whose launches take longer
than they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Learn = Callable[[torch.Tensor, torch.Tensor, float], Found]
"""(sequences [S], anchors [S, A], part of acceptance in the loss) to what is told of a step; all on the device."""


_PLAIN_STEPS = 2
"""Before a graph is captured: what is compiled is compiled in these."""


class _Captured:
    """One graph, what it reads, and what it tells."""

    def __init__(
        self,
        learn: Learn,
        rows_S: torch.Tensor,
        anchors_SA: torch.Tensor,
        accepting: float,
        where: tuple[Any, torch.cuda.Stream],
    ) -> None:
        """`where`: memory pool and stream of the capture."""
        self._rows_S, self._anchors_SA = rows_S.clone(), anchors_SA.clone()
        self._graph = torch.cuda.CUDAGraph()
        pool, stream = where
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._found = learn(self._rows_S, self._anchors_SA, accepting)

    def run(self, rows_S: torch.Tensor, anchors_SA: torch.Tensor) -> Found:
        self._rows_S.copy_(rows_S)
        self._anchors_SA.copy_(anchors_SA)
        self._graph.replay()
        return self._found


class StepGraphs:
    """Each aim's first steps run as they are, the next is captured. Shapes stay as they are."""

    def __init__(self, learn: Learn) -> None:
        self._learn = learn
        self._seen: Counter[float] = Counter()
        self._captured: dict[float, _Captured] = {}
        self._where = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, rows_S: torch.Tensor, anchors_SA: torch.Tensor, accepting: float) -> Found:
        """As `Learn`; what it returns is good until the next step."""
        self._seen[accepting] += 1
        if self._seen[accepting] <= _PLAIN_STEPS:
            return self._plain(rows_S, anchors_SA, accepting)
        captured = self._captured.get(accepting)
        if captured is None:
            captured = _Captured(self._learn, rows_S, anchors_SA, accepting, self._where)
            self._captured[accepting] = captured
        return captured.run(rows_S, anchors_SA)

    def _plain(self, rows_S: torch.Tensor, anchors_SA: torch.Tensor, accepting: float) -> Found:
        """On the stream of captures: what autograd keeps of a parameter belongs to the stream that it was used on."""
        here, stream = torch.cuda.current_stream(), self._where[1]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found = self._learn(rows_S, anchors_SA, accepting)
        here.wait_stream(stream)
        return found
