"""The sequences of a scoring plan on their way through an engine, wave by wave, and what they bring."""

from __future__ import annotations

from typing import Any

from lowlat.engine.request import GenerateRequest, RequestOutput
from lowlat.engine.scoring import ScorePlan, request_of

Readings = list[list[list[float]]]
"""By item, by place that is read, by label: log-probabilities."""


class ScoreWaves:
    """Submit what `next_wave` gives, `take` every output until nothing is `open`, and go on until it gives nothing."""

    def __init__(self, plan: ScorePlan, name: str, items: int, **fields: Any) -> None:
        """`name`: beginning of the requests' ids; `fields`: see `request_of`."""
        self.plan = plan
        self.open: set[str] = set()
        """Ids of requests that have not ended."""
        self.readings: Readings = [[] for _ in range(items)]
        self.cached_tokens = 0
        self.queue_s: float | None = None
        self._name = name
        self._fields = fields
        self._wave = 0
        self._owners: dict[str, list[int]] = {}
        self._read: dict[str, int] = {}

    def next_wave(self) -> list[GenerateRequest]:
        """The requests to submit now; empty when all are done."""
        assert not self.open, "a wave starts when the one before it has ended"
        if self._wave == len(self.plan.waves):
            return []
        wave = self.plan.waves[self._wave]
        ids = [f"{self._name}.{self._wave}.{number}" for number in range(len(wave))]
        self._wave += 1
        self._owners = {id: sequence.items for id, sequence in zip(ids, wave, strict=True)}
        self._read = dict.fromkeys(ids, 0)
        self.open = set(ids)
        return [request_of(sequence, id, **self._fields) for id, sequence in zip(ids, wave, strict=True)]

    def take(self, output: RequestOutput) -> None:
        """Take in what a step brought for one of the requests."""
        if output.scores:
            first = self._read[output.id]
            self._read[output.id] += len(output.scores)
            for item, score in zip(self._owners[output.id][first:], output.scores, strict=False):
                self.readings[item].append(score)
            if self.queue_s is None:
                self.queue_s = output.queue_s
        if output.finish_reason is not None:
            self.open.discard(output.id)
            self.cached_tokens += output.cached_tokens
