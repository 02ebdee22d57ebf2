"""Sums and tokens of few rows by pushes into the peers' memory, of many by the group. Importing this imports triton.

Legend of shape suffixes: see `row_sums`.
"""

from __future__ import annotations

import torch

from lowlat.layers.row_sums import CommunicatorSums, RankLostError
from lowlat.layers.triton.push_pick import pick_bytes, push_pick
from lowlat.layers.triton.push_reduce import memory_bytes, push_reduce_norm
from lowlat.parallel.group import Communicator
from lowlat.parallel.peer_memory import PeerMemory, PeerMemoryError

__all__ = ["MOST_BYTES", "PushSums"]

MOST_BYTES = 192 * 1024
"""Of a rank's rows; larger messages go by NCCL. On two H200s pushes are faster at 112 KiB, slower at 512 KiB
(benchmarks/tensor_parallel.py)."""


_MOST_PICKS = 256
"""Rows whose tokens are picked by pushes."""


class PushSums:
    """`RowSums` of bfloat16 rows of one width, for ranks whose GPUs write to each other's memory."""

    def __init__(
        self,
        communicator: Communicator,
        others: CommunicatorSums,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        early_start: bool = False,
    ) -> None:
        """`early_start`: as in `TritonOps`.

        All ranks call this together. Raises `PeerMemoryError` on all of them where that cannot be.
        """
        ranks = communicator.shard.size
        self._others = others
        self._early = early_start
        self._rank = communicator.shard.rank
        self._deadline_s = communicator.timeout_s
        self.rows = max(1, MOST_BYTES // (2 * width))
        """Most rows of a push."""
        if dtype != torch.bfloat16:
            raise PeerMemoryError(f"pushes are for bfloat16, and this model computes in {dtype}")
        if width % 2:
            raise PeerMemoryError(f"pushes need an even number of values a row, not {width}")
        self._picks = memory_bytes(ranks, self.rows, width)
        self._memory = PeerMemory(communicator, self._picks + pick_bytes(ranks, _MOST_PICKS), device)
        self._memories = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._tags = torch.zeros(self.rows, dtype=torch.int32, device=device)
        self._pick_tags = torch.zeros(_MOST_PICKS, dtype=torch.int32, device=device)
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        communicator.when_stopped(lambda: self._memory.fill_word(0, 1))

    def reduce(self, x_RH: torch.Tensor) -> torch.Tensor:
        """By the group: what follows is not fused."""
        return self._others.reduce(x_RH)

    def reduce_add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """One kernel where the rows are few."""
        if len(x_RH) > self.rows:
            return self._others.reduce_add_norm(x_RH, residual_RH, weight_H, eps)
        return push_reduce_norm(
            x_RH, residual_RH, weight_H, eps, memories=self._memories, tags=self._tags, alarm=self._alarm,
            rank=self._rank, deadline_s=self._deadline_s, early_start=self._early,
        )  # fmt: skip

    def pick(self, logits_MC: torch.Tensor, first: int, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """Two kernels for up to `_MOST_PICKS` rows."""
        if len(logits_MC) > _MOST_PICKS:
            return self._others.pick(logits_MC, first, slots_M, tokens_T)
        return push_pick(
            logits_MC, first, slots_M, tokens_T, memories=self._memories, offset=self._picks, tags=self._pick_tags,
            alarm=self._alarm, rank=self._rank, deadline_s=self._deadline_s, early_start=self._early,
        )  # fmt: skip

    def check(self) -> None:
        """See `RowSums`: kernels leave their word in this process's memory."""
        if int(self._alarm[0]):
            raise RankLostError(
                f"rank {self._rank}: a rank's part of sum {int(self._alarm[0])} did not come within "
                f"{self._deadline_s:g} s (half of --watchdog-s); its own message is above, or it hangs"
            )
        self._others.check()
