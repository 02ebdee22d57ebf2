"""Mixtures of experts: a router chooses a few of many gated MLPs for each row.

Legend of shape suffixes: R rows, H hidden, E experts, A experts a row, X = R * A routed rows, sorted by expert,
I intermediate part of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from lowlat.layers.activation import GatedActivation
from lowlat.platform.base import PackedLinear


class TopKRouter:
    """Scores every expert for every row and keeps the best; in float32, whatever the model's type."""

    def __init__(self, weight_EH: torch.Tensor, bias_E: torch.Tensor | None, chosen: int, *, normalised: bool) -> None:
        """`normalised`: the weights of a row's chosen experts sum to one, otherwise those of all experts do."""
        if not 0 < chosen <= len(weight_EH):
            raise ValueError(f"{chosen} experts a row cannot be chosen out of {len(weight_EH)}")
        self._weight_EH = weight_EH.float()
        self._bias_E = None if bias_E is None else bias_E.float()
        self._chosen = chosen
        self._normalised = normalised

    def __call__(self, x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each row and their weights, best first: int64 and float32 [R, A]."""
        scores_RE = F.linear(x_RH.float(), self._weight_EH, self._bias_E)
        if not self._normalised:
            weights_RA, experts_RA = scores_RE.softmax(dim=-1).topk(self._chosen, dim=-1)
            return experts_RA, weights_RA
        best_RA, experts_RA = scores_RE.topk(self._chosen, dim=-1)
        return experts_RA, best_RA.softmax(dim=-1)


class Experts:
    """Gated MLPs, each a pair of packed weights: [gate; up] and down. Only experts that a row chose are computed."""

    def __init__(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        activation: GatedActivation,
        *,
        min_rows: int = 1,
    ) -> None:
        """`min_rows`: an expert with fewer rows computes this many, where the platform does that faster."""
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._min_rows = min_rows

    def __call__(self, x_RH: torch.Tensor, experts_RA: torch.Tensor, weights_RA: torch.Tensor) -> torch.Tensor:
        """Weighted sum over each row's experts, [R, H]; added in the router's order, whatever the other rows are."""
        rows, chosen = experts_RA.shape
        experts_X, order_X = experts_RA.flatten().sort(stable=True)
        counts = torch.bincount(experts_X, minlength=len(self.down)).tolist()
        x_XH = x_RH.index_select(0, order_X // chosen)
        out_XH = torch.empty_like(x_XH)
        first = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            part = slice(first, first + count)
            part_XH = F.pad(x_XH[part], (0, 0, 0, max(0, self._min_rows - count)))
            gate_XI, up_XI = self.gate_up[expert](part_XH).chunk(2, dim=-1)
            out_XH[part] = self.down[expert](self.activation(gate_XI, up_XI))[:count]
            first += count
        out_RAH = torch.empty_like(out_XH).index_copy_(0, order_X, out_XH).view(rows, chosen, -1)
        return (out_RAH * weights_RA.unsqueeze(-1).to(out_RAH.dtype)).sum(dim=1)


class MixtureOfExperts:
    """Router and experts of one layer on one rank; ranks hold a part of every expert and sum their results."""

    def __init__(
        self, router: TopKRouter, experts: Experts, all_reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.router = router
        self.experts = experts
        self.all_reduce = all_reduce

    def __call__(self, x_RH: torch.Tensor, real_rows: int) -> torch.Tensor:
        """[R, H]; padding rows, which would touch experts that nobody needs, get zeros."""
        real_RH = x_RH[:real_rows]
        out_RH = self.all_reduce(self.experts(real_RH, *self.router(real_RH)))
        return F.pad(out_RH, (0, 0, 0, len(x_RH) - real_rows)) if real_rows < len(x_RH) else out_RH
