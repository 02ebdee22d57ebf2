"""How a training changes as it goes on: its learning rate, and what its loss is made of."""

from __future__ import annotations

import math

import msgspec

_WARM = 0.03
"""Part of a training in which the learning rate rises."""
_FIRST = 1e-3
"""So much further than it is: the first step shall learn something."""
_COOLED = 0.02
"""Of the highest learning rate, at the end."""


class Schedule(msgspec.Struct, frozen=True):
    """By the part of the training that is done, from 0 to 1."""

    learning_rate: float
    cooling: float
    """Part of the training, at its end, in which the learning rate falls."""
    accepting: float
    accepting_part: float
    """Part of the training, at its end, in which `accepting` of the loss is the number of accepted tokens."""

    def rate(self, done: float) -> float:
        """The learning rate: it rises, stays, and falls along half a cosine."""
        fallen = max(0.0, 1 - (1 - done) / self.cooling) if self.cooling else 0.0
        cooled = _COOLED + (1 - _COOLED) * 0.5 * (1 + math.cos(math.pi * fallen))
        return self.learning_rate * min(1.0, (done + _FIRST) / _WARM) * cooled

    def accepting_at(self, done: float) -> float:
        """How much of the loss is the number of accepted tokens."""
        return self.accepting if self.accepting and done >= 1 - self.accepting_part else 0.0
