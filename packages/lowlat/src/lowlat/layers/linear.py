"""Linear layers of a tensor-parallel group: which part of a weight a rank multiplies.

Legend of shape suffixes: R rows, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lowlat.parallel.shard import Shard
from lowlat.platform import Platform
from lowlat.platform.base import PackedLinear


class ReadWeight(Protocol):
    """Reads a weight in the model's type, or a part of its first and second dimension."""

    def __call__(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read."""


def split_outputs(
    read: ReadWeight, platform: Platform, parts: Sequence[tuple[str, slice]], *, bias: bool
) -> PackedLinear:
    """Several projections of the same input as one: this rank's output features of each, side by side.

    Args:
        read: where weights come from.
        platform: packs the result.
        parts: names without `.weight`, and the output features of each that this rank computes.
        bias: whether they have one.
    """
    weight_OI = torch.cat([read(f"{name}.weight", rows=rows) for name, rows in parts])
    bias_O = torch.cat([read(f"{name}.bias", rows=rows) for name, rows in parts]) if bias else None
    return platform.pack(weight_OI, bias_O)


def split_inputs(
    read: ReadWeight, platform: Platform, shard: Shard, name: str, inputs: slice, *, bias: bool
) -> PackedLinear:
    """A projection of this rank's part of the input. Ranks' results are to be summed: one alone adds the bias."""
    bias_O = read(f"{name}.bias") if bias and shard.rank == 0 else None
    return platform.pack(read(f"{name}.weight", columns=inputs), bias_O)
