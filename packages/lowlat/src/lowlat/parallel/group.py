"""The ranks of one tensor-parallel group, over torch.distributed: gloo for tensors on CPUs, NCCL for those on GPUs."""

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
    timeout_s: float
    """A rank that makes the others wait longer than this counts as lost."""
    stopped: bool
    """Whether `stop` was called: what was exchanged since means nothing."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place."""

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum `x` over the ranks, in place; call what is returned for the sum. Ranks start in one order."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, which has one shape on all of them, [ranks, ...]."""

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Join the ranks' parts of the last dimension (cut by `Shard.part`) to `total` columns on every rank."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's `x`, in place."""

    def when_stopped(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the group gives up, so that kernels that wait for a lost rank end."""

    def stop(self) -> None:
        """Give up: what waits for a lost rank on a GPU ends, with results that mean nothing. From any thread."""


class SingleRank:
    """A group of one."""

    shard = Shard()
    timeout_s = 0.0
    stopped = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing to sum."""
        return x

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Nothing to sum."""
        return lambda: x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """One part."""
        return x.unsqueeze(0)

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Nothing to join."""
        return x_RC

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Nothing to send."""
        return x

    def when_stopped(self, stop: Callable[[], None]) -> None:
        """Nobody can be lost."""

    def stop(self) -> None:
        """Nobody waits."""


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
        each, which must be the current device by then.

        Raises `RuntimeError` when a rank is missing after `join_timeout_s` seconds (a rank's process imports PyTorch
        first), and from exchanges on CPUs that take longer than `timeout_s`.
        """
        self.shard = shard
        self.timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._stops: list[Callable[[], None]] = []
        self.stopped = False
        self._nccl = "nccl" in backend
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
        if x.is_cuda:
            dist.all_reduce(x)
            return lambda: x
        work = dist.all_reduce(x, async_op=True)

        def wait() -> torch.Tensor:
            self._wait(work)
            return x

        return wait

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`."""
        x = x.contiguous()
        parts = x.new_empty((self.shard.size, *x.shape))
        if x.is_cuda:
            # On a GPU the stream waits and not the host, so that exchanges can be queued and captured.
            dist.all_gather_into_tensor(parts, x)
        else:
            self._wait(dist.all_gather(list(parts.unbind(0)), x, async_op=True))
        return parts

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        """Join the ranks' columns; parts are padded to one size for the exchange."""
        size = self.shard.size
        widths = [Shard(rank, size).length(total) for rank in range(size)]
        padded = torch.nn.functional.pad(x_RC, (0, max(widths) - x_RC.shape[-1]))
        parts = self.gather(padded).unbind(0)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's `x`, in place."""
        if x.is_cuda:
            dist.broadcast(x, src=0)
        else:
            self._wait(dist.broadcast(x, src=0, async_op=True))
        return x

    def when_stopped(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the group gives up."""
        self._stops.append(stop)

    def stop(self) -> None:
        """Give up: kernels that wait for a lost rank end, with results that mean nothing. From any thread."""
        if self.stopped:
            return
        self.stopped = True
        for stop in self._stops:
            stop()
        if self._nccl:
            self._leave(_abort)

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self._timeout)

    def close(self) -> None:
        """Leave the group. Without it, a process may abort at its end in the group's threads."""
        self._leave(dist.destroy_process_group)

    def _leave(self, leave: Callable[[], None]) -> None:
        # Leaving a group that lost a rank may wait for it: that must not hold up the caller.
        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)


def _abort() -> None:
    """End NCCL's kernels that are in flight."""
    group = dist.group.WORLD
    if group is not None:
        group._get_backend(torch.device("cuda")).abort()
