"""Steps in which many sequences of one length go on: plain ones, and on a GPU one graph for all lengths.

Legend of shape suffixes: S sequences, Y rows of each in a step, R = S * Y rows, H hidden, X taps * H, V vocabulary.
"""

from __future__ import annotations

import torch

from lowlat.cache.layout import KVPool
from lowlat.layers.step import EvenGroup, StepInputs
from lowlat.models.decoder import Decoder, Taps

_PLAIN_STEPS = 2
"""Before a graph is captured: what is made at first use is made in these."""


class Steps:
    """The steps of writings of one shape."""

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        layers: tuple[int, ...],
        sequences: int,
        room: int,
    ) -> None:
        """`room`: most tokens of a sequence; `layers`: whose states are wanted."""
        self._model, self._pool, self._layers = model, pool, layers
        self._sequences, self._room = sequences, room
        self.generator: torch.Generator | None = None
        """For what is not drawn in a graph."""
        device = self._device = model.embedding_VH.device
        self._samples_S = torch.arange(sequences, device=device)
        self._slots_S1 = self._samples_S[:, None] * room
        # What a graph reads, and what it wrote last.
        self._tokens_S1 = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._heat_1 = torch.zeros(1, device=device)
        self._wrote: tuple[torch.Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._seen = 0

    def run(
        self, tokens_SY: torch.Tensor, first: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute rows from place `first` on, and choose the tokens after them: states of the layers [S, Y, X], last
        states [S, Y, H], chosen tokens [S]. Good until the next call."""
        each = tokens_SY.shape[1]
        if self._device.type != "cuda" or each > 1:
            places_Y = torch.arange(first, first + each, device=self._device)
            return self._step(tokens_SY, places_Y, EvenGroup(self._sequences, first + each, self._room), temperature)
        self._tokens_S1.copy_(tokens_SY)
        self._place_1.fill_(first)
        self._heat_1.fill_(temperature)
        if self._graph is not None:
            self._graph.replay()
        elif self._seen < _PLAIN_STEPS:
            self._seen += 1
            self._wrote = self._next()
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._wrote = self._next()
            self._graph.replay()
        features_SYX, x_SYH, chosen_S = self._wrote
        return features_SYX, x_SYH, chosen_S

    def _next(self) -> tuple[torch.Tensor, ...]:
        group = EvenGroup(self._sequences, 0, self._room, self._place_1 + 1)
        return self._step(self._tokens_S1, self._place_1, group, None)

    def _step(
        self, tokens_SY: torch.Tensor, places_Y: torch.Tensor, group: EvenGroup, temperature: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        taken: list[torch.Tensor] = []
        step = StepInputs(
            tokens_R=tokens_SY.flatten(),
            positions_R=places_Y.repeat(self._sequences),
            write_slots=(self._slots_S1 + places_Y).flatten(),
            real_rows=tokens_SY.numel(),
            segments=[],
            decodes=[],
            sample_rows=self._samples_S,
            even=group,
        )
        self._model.taps = Taps(self._layers, lambda features_RX, _: taken.append(features_RX))
        x_SYH = self._model.states(step, self._pool).view(*tokens_SY.shape, -1)
        self._model.taps = None
        logits_SV = self._model.logits(x_SYH[:, -1])
        chosen_S = self._hot(logits_SV) if temperature is None else self._drawn(logits_SV, temperature)
        return taken[0].view(*tokens_SY.shape, -1), x_SYH, chosen_S

    def _hot(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """At the temperature that the device knows: the largest sum of logit and noise times temperature."""
        noise_SV = torch.empty_like(logits_SV).exponential_().log_()
        return torch.addcmul(logits_SV, noise_SV, self._heat_1, value=-1).argmax(-1)

    def _drawn(self, logits_SV: torch.Tensor, temperature: float) -> torch.Tensor:
        if temperature <= 0:
            return logits_SV.argmax(-1)
        return torch.multinomial((logits_SV / temperature).softmax(-1), 1, generator=self.generator)[:, 0]
