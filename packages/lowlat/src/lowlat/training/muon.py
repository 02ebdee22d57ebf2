"""Muon (Jordan 2024): momentum whose update of a matrix is the nearest one with all singular values alike.

Legend of shape suffixes: M matrices of one shape, O outputs, I inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon:
    """For matrices between states. Steps are as long as AdamW's at the same learning rate (Liu et al. 2025)."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], *, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        self.rate: float | torch.Tensor = 0.0
        """A tensor of one number where a graph shall read it."""
        self._momentum, self._decay = momentum, weight_decay
        by_shape: dict[torch.Size, list[str]] = defaultdict(list)
        for name, weight in weights.items():
            by_shape[weight.shape].append(name)
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        self.averages: dict[str, torch.Tensor] = {}
        """Of gradients, by the weights' names: all that it remembers."""
        for shape, names in by_shape.items():
            of = [weights[name] for name in names]
            average_MOI = torch.zeros(len(of), *shape, device=of[0].device)
            self._groups.append((of, average_MOI))
            self.averages |= dict(zip(names, average_MOI, strict=True))

    @torch.no_grad()
    def step(self) -> None:
        """Change the weights by their gradients."""
        for weights, average_MOI in self._groups:
            gradients_MOI = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            average_MOI.lerp_(gradients_MOI, 1 - self._momentum)
            ahead_MOI = gradients_MOI.lerp_(average_MOI, self._momentum)
            length = 0.2 * max(average_MOI.shape[1:]) ** 0.5
            updates_MOI = orthogonal(ahead_MOI)
            for weight, update_OI in zip(weights, updates_MOI, strict=True):
                weight.mul_(1 - self.rate * self._decay).sub_(update_OI * (self.rate * length))


def orthogonal(x_MOI: torch.Tensor) -> torch.Tensor:
    """U V^T of each matrix's singular value decomposition U S V^T, roughly: by Newton and Schulz's iteration."""
    tall = x_MOI.shape[1] > x_MOI.shape[2]
    x = (x_MOI.mT if tall else x_MOI) / (x_MOI.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if x.device.type != "cpu":
        x = x.bfloat16()
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = (x.mT if tall else x).float()
    return result
