"""Attention of items: rows that see a shared prefix and their own item alone, many items in one sequence.

Each part of what a row sees is attended to by itself, and the parts are merged by their log-sum-exp: all rows against
the prefix's keys as one dense block, and items of similar length against their own keys as a batch of causal squares.
So nothing grows with the square of the number of items, and no mask tells items apart.

Legend of shape suffixes: T rows of the group, S KV slots, K key-value heads, G query heads a key-value head,
N = K * G query heads, D head dimension, P tokens of a part, B items of a batch, L rows of an item.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lowlat.layers.step import ItemGroup, KeySpan

if TYPE_CHECKING:
    from lowlat.layers.attention import AttentionRule

Part = tuple[torch.Tensor, torch.Tensor]
"""(what rows found in one part of what they see [T, N, D], log-sum-exp of their scores there [T, N])."""

_SCORE_ENTRIES = 1 << 23
"""Scores computed at a time."""

_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""PyTorch's attention for CPUs, which also tells the log-sum-exp. Its public door does not; without it plain products
do the same."""


def item_attention(
    q_TND: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, group: ItemGroup, rule: AttentionRule
) -> torch.Tensor:
    """softmax(q k^T scale) v of every row over the shared prefix and its own item up to itself: [T, N, D]."""
    scale = 1 / math.sqrt(q_TND.shape[-1]) if rule.scale is None else rule.scale
    parts = [_own_items(q_TND, keys_SKD, values_SKD, group, scale, rule.window)]
    if group.prefix.length:
        before = group.offsets_T if rule.window else None
        parts.append(_span(q_TND, keys_SKD, values_SKD, group.prefix, scale, rule.window, before))
    if group.earlier.length:
        # Only the first piece has rows of its item in chunks before.
        first = group.first_rows
        before = torch.arange(first, device=q_TND.device) if rule.window else None
        out, lse = _span(q_TND[:first], keys_SKD, values_SKD, group.earlier, scale, rule.window, before)
        whole_lse = lse.new_full(q_TND.shape[:2], float("-inf"))
        whole_lse[:first] = lse
        whole = out.new_zeros(q_TND.shape)
        whole[:first] = out
        parts.append((whole, whole_lse))
    return _merge(parts, rule.sinks_N).to(q_TND.dtype)


def _merge(parts: list[Part], sinks_N: torch.Tensor | None) -> torch.Tensor:
    """The softmax over all parts together, and over a head's sink where there is one."""
    lse_PTN = torch.stack([lse for _, lse in parts])
    total_TN = lse_PTN.logsumexp(0)
    if sinks_N is not None:
        total_TN = torch.logaddexp(total_TN, sinks_N.float())
    weights_PTN1 = (lse_PTN - total_TN).exp().unsqueeze(-1)
    merged_TND = parts[0][0] * weights_PTN1[0]
    for (out_TND, _), weight_TN1 in zip(parts[1:], weights_PTN1[1:], strict=True):
        merged_TND += out_TND * weight_TN1
    return merged_TND


def _span(
    q_TND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    span: KeySpan,
    scale: float,
    window: int,
    before_T: torch.Tensor | None,
) -> Part:
    """All rows against all keys of a span. With a `window`, `before_T` counts the tokens between span and row."""
    length = min(span.length, window - 1) if window else span.length
    skipped = span.length - length
    if span.run >= 0:
        keys_PKD = keys_SKD[span.run + skipped : span.run + span.length]
        values_PKD = values_SKD[span.run + skipped : span.run + span.length]
    else:
        keys_PKD = keys_SKD.index_select(0, span.slots_P[skipped:])
        values_PKD = values_SKD.index_select(0, span.slots_P[skipped:])
    rows, heads, dim = q_TND.shape
    kv_heads = keys_PKD.shape[1]
    if not length:
        return q_TND.new_zeros(q_TND.shape, dtype=torch.float32), q_TND.new_full((rows, heads), float("-inf"))
    keys_KPD, values_KPD = keys_PKD.transpose(0, 1), values_PKD.transpose(0, 1)
    outs, sums = [], []
    block = max(1, _SCORE_ENTRIES // (length * heads))
    for first in range(0, rows, block):
        q_part = q_TND[first : first + block]
        q_KXD = q_part.view(-1, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        mask = None
        if before_T is not None:
            # Key j of the span is (length - j) + before tokens behind the row; a window reaches window - 1 back.
            back_TP = length - torch.arange(length, device=q_TND.device) + before_T[first : first + block, None]
            mask = (back_TP >= window).repeat_interleave(heads // kv_heads, dim=0)
        out_KXD, lse_KX = _attend(q_KXD, keys_KPD, values_KPD, mask, scale, blind=mask is not None)
        count = len(q_part)
        outs.append(out_KXD.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim))
        sums.append(lse_KX.view(kv_heads, count, -1).transpose(0, 1).reshape(count, heads))
    return torch.cat(outs), torch.cat(sums)


def _own_items(
    q_TND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    group: ItemGroup,
    scale: float,
    window: int,
) -> Part:
    """Every row against the rows of its own piece up to itself."""
    _, heads, dim = q_TND.shape
    kv_heads = keys_SKD.shape[1]
    outs, sums = [], []
    for batch in group.batches:
        items, length = batch.slots_BL.shape
        per_item = length * length * heads
        # Long items go one by one and, beyond the limit, some rows at a time.
        block, rows = max(1, _SCORE_ENTRIES // per_item), max(1, min(length, _SCORE_ENTRIES // (length * heads)))
        for first in range(0, items, block):
            rows_BL, slots_BL = batch.rows_BL[first : first + block], batch.slots_BL[first : first + block]
            keys_BKLD, values_BKLD = keys_SKD[slots_BL].transpose(1, 2), values_SKD[slots_BL].transpose(1, 2)
            count, parts = len(rows_BL), []
            for begin in range(0, length, rows):
                end = min(length, begin + rows)
                q_BLKGD = q_TND[rows_BL[:, begin:end]].view(count, end - begin, kv_heads, -1, dim)
                hidden = _hidden(begin, end, window, q_TND.device).repeat_interleave(heads // kv_heads, dim=0)
                q_BKXD = q_BLKGD.transpose(1, 2).reshape(count, kv_heads, -1, dim)
                seen = keys_BKLD[:, :, :end], values_BKLD[:, :, :end]
                out_BKXD, lse_BKX = _attend(q_BKXD, *seen, hidden, scale, blind=False)
                out_BLKGD = out_BKXD.view(count, kv_heads, end - begin, -1, dim).transpose(1, 2)
                lse_BLKG = lse_BKX.view(count, kv_heads, end - begin, -1).transpose(1, 2)
                parts.append((out_BLKGD.flatten(2, 3), lse_BLKG.flatten(2)))
            outs.append(torch.cat([out for out, _ in parts], dim=1).flatten(0, 1))
            sums.append(torch.cat([lse for _, lse in parts], dim=1).flatten(0, 1))
    return torch.cat(outs).index_select(0, group.places_T), torch.cat(sums).index_select(0, group.places_T)


def _hidden(begin: int, end: int, window: int, device: torch.device) -> torch.Tensor:
    """True where rows `begin` to `end` - 1 of an item do not see its first `end` rows: later ones, and by a window."""
    behind = torch.arange(begin, end, device=device)[:, None] - torch.arange(end, device=device)
    return (behind < 0) | (behind >= window) if window else behind < 0


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None, scale: float, *, blind: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp, in float32: [..., X, D] and [..., X] of q [..., X, D] and keys [..., P, D].

    `hidden` [X, P] is true where a row does not see a key. `blind`: some rows may see none; they get zeros and minus
    infinity.
    """
    if _FUSED is not None and q.device.type == "cpu" and not blind:
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        single = q.dim() == 3
        parts = [part.unsqueeze(0) if single else part for part in (q, keys, values)]
        out, lse = _FUSED(*parts, 0.0, False, attn_mask=mask, scale=scale)
        return (out[0].float(), lse[0]) if single else (out.float(), lse)
    scores = torch.matmul(q, keys.transpose(-1, -2)).float() * scale
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    # A row that sees nothing: its weights are e^-inf, whatever is taken off.
    scores.sub_(lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
    return torch.matmul(scores.to(values.dtype), values).float(), lse
