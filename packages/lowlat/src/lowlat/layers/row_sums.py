"""Sums of rows over the ranks of a tensor-parallel group, with what follows them in a decoder layer.

Legend of shape suffixes: see `device_step`.
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

    def check(self) -> None:
        """Lost ranks are errors of the exchange itself."""
