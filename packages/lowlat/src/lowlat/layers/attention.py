"""Attention over paged keys and values, the general path: PyTorch's own attention on gathered or adjoining slots.

Legend of shape suffixes: R rows, S KV slots, K key-value heads, G query heads a key-value head, N = K * G query heads,
D head dimension, L tokens seen, B requests.
"""

from __future__ import annotations

import math

import msgspec
import torch
import torch.nn.functional as F

from lowlat.layers.item_attention import item_attention
from lowlat.layers.step import DecodeGroup, EvenGroup, Segment, StepInputs

# Masks are built for at most so many (query, key) pairs at a time; longer prefills go block by block.
_MASK_ENTRIES = 1 << 23


class AttentionRule(msgspec.Struct, frozen=True):
    """What a layer's attention is beyond softmax(q k^T / sqrt(D)) v."""

    scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(D)."""
    window: int = 0
    """Tokens that a row sees, its own included; 0: all. The step must come from `within_window`."""
    sinks_N: torch.Tensor | None = None
    """A score for each head that takes part in the softmax and has no value: attention to nothing."""


PLAIN = AttentionRule()


def paged_attention(
    q_RND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    step: StepInputs,
    rule: AttentionRule = PLAIN,
) -> torch.Tensor:
    """softmax(q k^T scale) v for every row over its own request's tokens up to itself; padding rows give zeros.

    Returns [R, N * D].
    """
    rows, heads, head_dim = q_RND.shape
    kv_heads = keys_SKD.shape[1]
    if step.even is not None:
        return _even(q_RND, keys_SKD, values_SKD, step.even, rule)
    if len(step.segments) == 1 and step.segments[0].rows == rows and not step.decodes:
        return _segment(q_RND, keys_SKD, values_SKD, step.segments[0], rule).reshape(rows, heads * head_dim)
    out_RX = q_RND.new_zeros(rows, heads * head_dim)
    for segment in step.segments:
        end = segment.first + segment.rows
        out = _segment(q_RND[segment.first : end], keys_SKD, values_SKD, segment, rule)
        out_RX[segment.first : end] = out.reshape(segment.rows, heads * head_dim)
    for items in step.items:
        end = items.first + items.rows
        out = item_attention(q_RND[items.first : end], keys_SKD, values_SKD, items, rule)
        out_RX[items.first : end] = out.reshape(items.rows, heads * head_dim)
    for group in step.decodes:
        q_BKGD = q_RND.index_select(0, group.rows).view(-1, kv_heads, heads // kv_heads, head_dim)
        out_RX.index_copy_(0, group.rows, _decode_group(q_BKGD, keys_SKD, values_SKD, group, rule).flatten(1))
    return out_RX


def _decode_group(
    q_BKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, group: DecodeGroup, rule: AttentionRule
) -> torch.Tensor:
    """One query token for each of B requests: the G heads that share a key-value head are its query rows."""
    requests, longest = group.slots.shape
    shape = (requests, longest, *keys_SKD.shape[1:])
    keys_BKLD = keys_SKD.index_select(0, group.slots.view(-1)).view(shape).transpose(1, 2)
    values_BKLD = values_SKD.index_select(0, group.slots.view(-1)).view(shape).transpose(1, 2)
    return masked_attention(q_BKGD, keys_BKLD, values_BKLD, group.mask, rule)


def _even(
    q_RND: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, group: EvenGroup, rule: AttentionRule
) -> torch.Tensor:
    """Every request at once, over views of the pools: first rows of an empty context, or one row each."""
    rows, heads, dim = q_RND.shape
    each, kv_heads = rows // group.requests, keys_SKD.shape[1]
    if group.length_1 is not None:
        from lowlat.layers.triton.even import even_attention

        scale = 1 / math.sqrt(dim) if rule.scale is None else rule.scale
        return even_attention(q_RND, keys_SKD, values_SKD, group.length_1, group.room, scale).view(rows, heads * dim)
    keys_BKLD, values_BKLD = (
        pool[: group.requests * group.room]
        .view(group.requests, group.room, kv_heads, dim)[:, : group.length]
        .transpose(1, 2)
        for pool in (keys_SKD, values_SKD)
    )
    if each == 1:
        q_BKGD = q_RND.view(group.requests, kv_heads, -1, dim)
        return masked_attention(q_BKGD, keys_BKLD, values_BKLD, None, rule).reshape(rows, heads * dim)
    if each != group.length or rule.sinks_N is not None or rule.window:
        raise ValueError("even groups of several rows begin their context, and have neither windows nor sinks")
    q_BNTD = q_RND.view(group.requests, each, heads, dim).transpose(1, 2)
    mixed_BNTD = F.scaled_dot_product_attention(
        q_BNTD, keys_BKLD, values_BKLD, is_causal=True, scale=rule.scale, enable_gqa=True
    )
    return mixed_BNTD.transpose(1, 2).reshape(rows, heads * dim)


def _segment(
    q_TND: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, segment: Segment, rule: AttentionRule
) -> torch.Tensor:
    """T query tokens of one request, the last of its L tokens: [T, N, D]."""
    if segment.run >= 0:
        keys_LKD = keys_SKD[segment.run : segment.run + segment.length]
        values_LKD = values_SKD[segment.run : segment.run + segment.length]
    else:
        keys_LKD = keys_SKD.index_select(0, segment.slots_L)
        values_LKD = values_SKD.index_select(0, segment.slots_L)
    keys_1KLD = keys_LKD.transpose(0, 1).unsqueeze(0)
    values_1KLD = values_LKD.transpose(0, 1).unsqueeze(0)
    if segment.rows == 1:
        return _grouped(q_TND, keys_1KLD, values_1KLD, None, rule)
    groups = q_TND.shape[1] // keys_1KLD.shape[1]
    block = max(1, _MASK_ENTRIES // (segment.length * groups))
    start = segment.length - segment.rows
    parts = []
    for first in range(0, segment.rows, block):
        q_part = q_TND[first : first + block]
        end = start + first + q_part.shape[0]
        begin = max(0, start + first + 1 - rule.window) if rule.window else 0
        mask_TL = _causal_mask(q_part.shape[0], end - begin, rule.window, q_TND)
        parts.append(_grouped(q_part, keys_1KLD[:, :, begin:end], values_1KLD[:, :, begin:end], mask_TL, rule))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _grouped(
    q_TND: torch.Tensor,
    keys_1KLD: torch.Tensor,
    values_1KLD: torch.Tensor,
    mask_TL: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention with the G heads of a key-value head laid out as query rows, so that keys are never repeated."""
    tokens, heads, head_dim = q_TND.shape
    kv_heads = keys_1KLD.shape[1]
    groups = heads // kv_heads
    q_1KXD = q_TND.view(tokens, kv_heads, groups, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    mask = None if mask_TL is None else mask_TL.repeat(groups, 1)
    out_1KXD = masked_attention(q_1KXD, keys_1KLD, values_1KLD, mask, rule)
    return out_1KXD.view(kv_heads, groups, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def masked_attention(
    q_BKXD: torch.Tensor,
    keys_BKLD: torch.Tensor,
    values_BKLD: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Query rows X are the G heads of a key-value head, each with its T tokens; [B, K, X, D]."""
    if rule.sinks_N is None:
        return F.scaled_dot_product_attention(q_BKXD, keys_BKLD, values_BKLD, attn_mask=mask, scale=rule.scale)
    scale = 1 / math.sqrt(q_BKXD.shape[-1]) if rule.scale is None else rule.scale
    scores_BKXL = torch.matmul(q_BKXD, keys_BKLD.transpose(2, 3)).float() * scale
    if mask is not None:
        scores_BKXL += mask
    batch, kv_heads, query_rows, _ = q_BKXD.shape
    sinks_KX = (
        rule.sinks_N.float().view(kv_heads, -1).repeat_interleave(query_rows * kv_heads // len(rule.sinks_N), dim=1)
    )
    sinks_BKX1 = sinks_KX[None, :, :, None].expand(batch, -1, -1, -1)
    weights_BKXL = torch.cat([scores_BKXL, sinks_BKX1], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights_BKXL.to(values_BKLD.dtype), values_BKLD)


def _causal_mask(rows: int, length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, length] of 0 and minus infinity for the last `rows` of `length` tokens."""
    mask = torch.full((rows, length), float("-inf"), dtype=like.dtype, device=like.device)
    mask.triu_(length - rows + 1)
    if window and length > window:
        # Row t is token length - rows + t: what lies `window` or more before it is below this diagonal.
        early = torch.full_like(mask, float("-inf")).tril_(length - rows - window)
        mask += early
    return mask
