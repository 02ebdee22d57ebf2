"""Inputs of the kernels that a decode step begins and ends with, on any device; checks against plain PyTorch."""

from __future__ import annotations

import torch

from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.triton.step import begin_decodes, greedy

REFERENCE = ReferenceOps()


def check_begin(slots: list[int], window: bool, device: torch.device | str) -> None:
    """`slots` of six, the last of which is padding."""
    padding, pages = 6, 5
    tokens_T = torch.randint(0, 1000, (7,), device=device)
    lengths_T = torch.tensor([3, 0, 14, 7, 8, 9, 0], device=device)
    tables = [(torch.randperm(7 * pages, device=device).int().view(7, pages), size) for size in (3, 4)[: 1 + window]]
    slots_B = torch.tensor(slots, device=device)
    mine_T, theirs_T = lengths_T.clone(), lengths_T.clone()
    mine = begin_decodes(slots_B, padding, tokens_T, mine_T, tables)
    theirs = REFERENCE.begin_decodes(slots_B, padding, tokens_T, theirs_T, tables)
    assert torch.equal(mine_T, theirs_T)
    assert theirs_T[padding] == 0
    assert len(mine.places) == 1 + window
    for name in mine.__struct_fields__:
        a, b = getattr(mine, name), getattr(theirs, name)
        for one, other in zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]:
            assert one.dtype == other.dtype, name
            assert torch.equal(one, other), name


def check_greedy(rows: int, vocabulary: int, device: torch.device | str, *, early_start: bool = False) -> None:
    logits_MV = torch.randn(rows, vocabulary, device=device)
    logits_MV[0, vocabulary // 2 :: 7] = 9.0  # equals: the first counts
    if rows > 4:
        logits_MV[1, vocabulary // 3] = float("nan")
        logits_MV[2, -1] = float("inf")
        logits_MV[3] = float("-inf")
        logits_MV[4, ::2] = float("-inf")
    slots_M = torch.randperm(rows + 3, device=device)[:rows]
    mine_T, theirs_T = torch.full((rows + 3,), 7, device=device), torch.full((rows + 3,), 7, device=device)
    mine = greedy(logits_MV, slots_M, mine_T, early_start=early_start)
    theirs = REFERENCE.greedy(logits_MV, slots_M, theirs_T)
    assert torch.equal(mine, theirs)
    assert mine[0] == vocabulary // 2
    assert torch.equal(mine_T, theirs_T)
    if rows > 4:
        assert mine[1:4].tolist() == [-1, -1, -1]
