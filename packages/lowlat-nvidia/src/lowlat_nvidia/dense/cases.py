"""Random steps for checks and timing: requests with pages dealt at random, and loud noise in all that is not theirs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.step import StepTensors


def make_case(
    shape: plans.DenseShape, positions: list[list[int]], page_size: int, seed: int, device: str = "cuda"
) -> tuple[StepTensors, list[tuple[Tensor, Tensor]]]:
    """A step over requests, each given by the positions of its rows, and the KV pools of every layer.

    Slots that hold none of the requests' earlier tokens are filled with 10,000, so that reading one shows.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    need = [-(-(rows[-1] + 1) // page_size) for rows in positions]
    total = sum(need) + 3
    order = torch.randperm(total, generator=generator, device=device).int()
    table = torch.full((len(positions), max(need)), 0, dtype=torch.int32, device=device)
    pools = []
    size = (total * page_size, shape.kv_heads, shape.head_dim)
    used = torch.zeros(total * page_size, dtype=torch.bool, device=device)
    at = 0
    for request, count in enumerate(need):
        table[request, :count] = order[at : at + count]
        at += count
        token = torch.arange(positions[request][0], device=device)
        used[table[request].long()[token // page_size] * page_size + token % page_size] = True
    for _ in range(shape.layers):
        pair = []
        for _ in range(2):
            pool = torch.randn(size, generator=generator, device=device).to(torch.bfloat16)
            pool[~used] = 1e4
            pair.append(pool)
        pools.append((pair[0], pair[1]))
    starts = [0, *itertools.accumulate(map(len, positions))]
    flat = [position for rows in positions for position in rows]
    tokens = torch.randint(0, shape.vocab, (len(flat),), generator=generator, device=device)

    def ints(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return StepTensors(tokens, ints(flat, torch.int64), ints(starts, torch.int32), table), pools


def one_row(step: StepTensors, row: int) -> StepTensors:
    """A row of a step without padding, alone."""
    request = int((step.query_start_Q1[1:] <= row).sum())
    return StepTensors(
        step.tokens_R[row : row + 1],
        step.positions_R[row : row + 1],
        torch.tensor([0, 1], dtype=torch.int32, device=step.tokens_R.device),
        step.page_table_TP[request : request + 1],
    )


def copy_pools(pools: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Pools that a step may write to while the originals stay."""
    return [(k.clone(), v.clone()) for k, v in pools]
