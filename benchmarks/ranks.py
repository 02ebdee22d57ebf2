"""Ranks of a benchmark, a process a GPU: how they meet, and times of graphs as the slowest of them sees them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def join(rank: int, ranks: int, port: int) -> None:
    """Makes this process a rank: gloo for objects, NCCL for tensors, a context on its GPU."""
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    torch.zeros(1, device="cuda")  # makes the context that peer buffers belong to


def exchange(blob: bytes) -> list[bytes]:
    """Every rank's bytes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, blob)
    return found


def slowest(
    graphs: dict[str, torch.cuda.CUDAGraph], rounds: int, steps_a_graph: int, replays: int = 30
) -> dict[str, list[float]]:
    """Microseconds of a step, the slowest rank's, arms in alternation; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name in graphs if turn % 2 else reversed(graphs):
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
            ]
            dist.barrier()
            for begin, end in events:
                begin.record()
                graphs[name].replay()
                end.record()
            torch.cuda.synchronize()
            times = torch.tensor([begin.elapsed_time(end) * 1e3 / steps_a_graph for begin, end in events[5:]])
            times = times.cuda()
            dist.all_reduce(times, dist.ReduceOp.MAX)
            if turn:
                samples[name] += times.tolist()
    return samples
