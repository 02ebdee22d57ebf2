"""Attention whose keys are its values, with a sink; compressors; the index that selects compressed entries.

Legend of shape suffixes: R rows, N heads, D head dimension, K keys a row, E entries, I index heads, T tokens,
B candidate blocks.

Plain PyTorch, row by row independent: every row gathers its own keys.
"""

from __future__ import annotations

import torch

# Scores and gathered keys are built for at most so many numbers at a time.
_BLOCK_NUMBERS = 1 << 24


def attend(q_RND: torch.Tensor, keys_RKD: torch.Tensor, seen_RK: torch.Tensor, sinks_N: torch.Tensor) -> torch.Tensor:
    """softmax([q k^T / sqrt(D), sink]) over the seen keys, times the keys; the sink has no value. [R, N, D]."""
    scores_RNK = torch.bmm(q_RND, keys_RKD.transpose(1, 2)) / q_RND.shape[-1] ** 0.5
    scores_RNK = scores_RNK.masked_fill(~seen_RK.unsqueeze(1), float("-inf"))
    top_RN1 = torch.maximum(scores_RNK.amax(-1), sinks_N).unsqueeze(-1)
    weights_RNK = torch.exp(scores_RNK - top_RN1)
    total_RN1 = weights_RNK.sum(-1, keepdim=True) + torch.exp(sinks_N.unsqueeze(-1) - top_RN1)
    return torch.bmm(weights_RNK, keys_RKD) / total_RN1


def row_block(numbers_a_row: int) -> int:
    """Rows to handle at a time."""
    return max(1, _BLOCK_NUMBERS // max(1, numbers_a_row))


# --- compressors -----------------------------------------------------------------------------------------------------


def compress(
    contents_TD: torch.Tensor, gates_TD: torch.Tensor, *, ratio: int, overlap: bool, previous: bool
) -> torch.Tensor:
    """Entries from whole windows of `ratio` tokens: softmax of the gates over a window, for each channel.

    Args:
        contents_TD, gates_TD: tokens from the beginning of a window on.
        overlap: D is twice the entries' width: an entry takes the first halves of the window before, and the second
            halves of its own.
        previous: with `overlap`: the first window given is only the one before the first entry; otherwise the first
            entry has none before it.

    Returns:
        [entries, width] for the windows given, without the leading one that only overlaps.
    """
    windows = len(contents_TD) // ratio
    contents = contents_TD[: windows * ratio].view(windows, ratio, -1)
    gates = gates_TD[: windows * ratio].view(windows, ratio, -1)
    if overlap:
        width = contents.shape[-1] // 2
        before, before_gates = contents[..., :width], gates[..., :width]
        if not previous:
            # Before the first window there is nothing: no content, no weight.
            before = torch.cat([torch.zeros_like(before[:1]), before])
            before_gates = torch.cat([torch.full_like(before_gates[:1], float("-inf")), before_gates])
        own = slice(1, None) if previous else slice(None)
        contents = torch.cat([before[:-1], contents[own, :, width:]], 1)
        gates = torch.cat([before_gates[:-1], gates[own, :, width:]], 1)
    return (torch.softmax(gates, 1) * contents).sum(1)


# --- index -----------------------------------------------------------------------------------------------------------


def index_scores(q_RID: torch.Tensor, weights_RI: torch.Tensor, keys_ED: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weight times ReLU(q k), [R, E]; weights carry their scale already."""
    parts = []
    block = row_block(q_RID.shape[1] * len(keys_ED))
    for start in range(0, len(q_RID), block):
        dots = torch.relu(torch.matmul(q_RID[start : start + block], keys_ED.T))
        parts.append(torch.bmm(weights_RI[start : start + block].unsqueeze(1), dots).squeeze(1))
    return torch.cat(parts)


def select(scores_RE: torch.Tensor, allowed_RE: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` best allowed entries of each row, -1 where fewer are allowed; ties go to the lower id."""
    scores = scores_RE.masked_fill(~allowed_RE, float("-inf"))
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    ids = ids[:, :count].masked_fill(values[:, :count] == float("-inf"), -1)
    if ids.shape[1] < count:
        ids = torch.nn.functional.pad(ids, (0, count - ids.shape[1]), value=-1)
    return ids


def candidate_blocks(
    scores_RE: torch.Tensor, visible_RE: torch.Tensor, positions_R: torch.Tensor, *, size: int, count: int
) -> torch.Tensor:
    """Ids of each row's `count` best blocks of `size` entries, -1 where there are fewer.

    A block scores as its best visible entry; the block of the row's own position always wins.
    """
    scores = scores_RE.masked_fill(~visible_RE, float("-inf"))
    scores = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=float("-inf"))
    blocks_RB = scores.view(len(scores), -1, size).amax(-1)
    blocks_RB.scatter_(1, (positions_R // size).unsqueeze(1), float("inf"))
    return select(blocks_RB, blocks_RB > float("-inf"), count)


def in_blocks(blocks_RB: torch.Tensor, entries: int, size: int) -> torch.Tensor:
    """Which of `entries` entries lie in each row's blocks, bool [R, E]."""
    count = -(-entries // size)
    # One place more, where the -1 of absent blocks goes.
    chosen = torch.zeros(len(blocks_RB), count + 1, dtype=torch.bool, device=blocks_RB.device)
    chosen.scatter_(1, blocks_RB.masked_fill(blocks_RB < 0, count), True)
    return chosen[:, :count].repeat_interleave(size, 1)[:, :entries]
