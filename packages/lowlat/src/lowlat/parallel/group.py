"""The ranks of one tensor-parallel group, over torch.distributed (gloo on CPUs)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lowlat.parallel.shard import Shard

_LEAVE_S = 10.0


class Communicator(Protocol):
    """What models and samplers need of their group."""

    shard: Shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place."""

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum `x` over the ranks, in place; call what is returned for the sum. Ranks start in one order."""

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Join the ranks' parts of the last dimension (cut by `Shard.part`) to `total` columns on every rank."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's `x`, in place."""


class SingleRank:
    """A group of one."""

    shard = Shard()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing to sum."""
        return x

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Nothing to sum."""
        return lambda: x

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Nothing to join."""
        return x_RC

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing to send."""
        return x


class TorchGroup:
    """A group over torch.distributed's default process group, of which a process has one at a time."""

    def __init__(
        self,
        shard: Shard,
        rendezvous_file: str,
        *,
        backend: str = "gloo",
        timeout_s: float = 60.0,
        join_timeout_s: float = 180.0,
    ) -> None:
        """Join the group; returns when all ranks have. `backend`: `gloo`, or `cpu:gloo,cuda:nccl` for ranks with a GPU
        each, which must be the current device by then (that was not tried on GPUs yet).

        Raises `RuntimeError` when a rank is missing after `join_timeout_s` seconds (a rank's process imports PyTorch
        first), and from exchanges that take longer than `timeout_s`.
        """
        self.shard = shard
        self._timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous_file}",
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=join_timeout_s),
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place."""
        return self.start_all_reduce(x)()

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum `x` over the ranks, in place; call what is returned for the sum. Ranks start in one order."""
        work = dist.all_reduce(x, async_op=True)

        def wait() -> torch.Tensor:
            self._wait(work, x)
            return x

        return wait

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Join the ranks' columns; parts are padded to one size for the exchange."""
        size = self.shard.size
        widths = [Shard(rank, size).length(total) for rank in range(size)]
        widest = max(widths)
        padded = torch.nn.functional.pad(x_RC, (0, widest - x_RC.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(size)]
        self._wait(dist.all_gather(parts, padded, async_op=True), padded)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's `x`, in place."""
        self._wait(dist.broadcast(x, src=0, async_op=True), x)
        return x

    def _wait(self, work: dist.Work | None, x: torch.Tensor) -> None:
        """On a GPU the stream waits and not the host, so that exchanges can be queued and captured."""
        if work is None:
            return
        if x.is_cuda:
            work.wait()
        else:
            work.wait(self._timeout)

    def close(self) -> None:
        """Leave the group. Without it, a process may abort at its end in the group's threads."""
        # Leaving a group that lost a rank may wait for it: that must not hold up the caller.
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
