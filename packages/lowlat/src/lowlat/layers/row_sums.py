"""What the ranks of a group tell each other in a step: sums of rows, with what follows them in a layer, and tokens.

Legend of shape suffixes: see `device_step`; M samples, C columns of a rank, T slots, K ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch

from lowlat.layers.device_step import DeviceOps
from lowlat.parallel.group import Communicator


class RankLostError(Exception):
    """A rank's part of a sum did not come in time: what was computed since means nothing."""


class RowSums(Protocol):
    """All may be captured in a graph, in the same order on all ranks."""

    def reduce(self, x_RH: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, perhaps in place."""

    def reduce_add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum over the ranks to `residual_RH` in place, and RMSNorm of that, [R, H]."""

    def pick(self, logits_MC: torch.Tensor, first: int, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """The first most likely token of each row over the ranks' columns, int64 [M]; -1 where logits are not numbers.

        `first`: the token of this rank's column 0. The tokens are also written to `tokens_T` at `slots_M`, 0 for -1.
        """

    def check(self) -> None:
        """Raises `RankLostError` when a sum of a finished step lacked a rank's part."""


class CommunicatorSums:
    """By the group's own all-reduce, whose waits are the group's business."""

    def __init__(self, communicator: Communicator, ops: DeviceOps) -> None:
        self._communicator = communicator
        self._ops = ops

    def reduce(self, x_RH: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        return self._communicator.all_reduce(x_RH)

    def reduce_add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """All-reduce, then addition and norm."""
        return self._ops.add_norm(self._communicator.all_reduce(x_RH), residual_RH, weight_H, eps)

    def pick(self, logits_MC: torch.Tensor, first: int, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """Every rank tells its best logit and token."""
        best_M, index_M = logits_MC.max(dim=-1)
        # One message: a float and a token, side by side as words.
        pair_2M = torch.stack([best_M.view(torch.int32), index_M.int() + first])
        pairs_K2M = self._communicator.gather(pair_2M)
        best_M, rank_M = pairs_K2M[:, 0].view(torch.float32).max(dim=0)
        tokens_M = pairs_K2M[:, 1].gather(0, rank_M[None])[0].long()
        tokens_M = torch.where(best_M.isfinite(), tokens_M, -1)
        tokens_T.index_copy_(0, slots_M, tokens_M.clamp(min=0))
        return tokens_M

    def check(self) -> None:
        """Exchanges that end because the group gave up leave no error, only numbers that mean nothing."""
        if self._communicator.stopped:
            raise RankLostError("a rank was lost, and the group has given up")
