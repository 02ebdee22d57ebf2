"""Manifold-constrained hyper-connections: several residual streams, mixed by small data-dependent matrices.

Legend of shape suffixes: R rows, n streams, H hidden, M = n (2 + n) mix logits.

Formulas: docs/models/deepseek_v41.md, section "Streams and mixes". Both wirings use the same mix: V4 reads the streams
with a sublayer's own `pre`, V4.1 with that of the sublayer before.
"""

from __future__ import annotations

import msgspec
import torch


class MixWeights(msgspec.Struct):
    """`fn` [M, n H], `base` [M], `scale` [3], all in the compute type."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class Mix(msgspec.Struct):
    """What a sublayer reads and writes: `pre` [R, n], `post` [R, n], `comb` [R, n, n] (from stream j to stream i)."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def mix(streams_RnH: torch.Tensor, weights: MixWeights, *, iterations: int, eps: float, rms_eps: float) -> Mix:
    """The mix of one sublayer, from the streams it reads."""
    n = streams_RnH.shape[1]
    logits = _projection(streams_RnH, weights.fn, rms_eps)
    pre = torch.sigmoid(logits[:, :n] * weights.scale[0] + weights.base[:n]) + eps
    post = 2 * torch.sigmoid(logits[:, n : 2 * n] * weights.scale[1] + weights.base[n : 2 * n])
    comb = (logits[:, 2 * n :] * weights.scale[2] + weights.base[2 * n :]).view(-1, n, n)
    return Mix(pre, post, sinkhorn(comb, iterations, eps))


def head_weights(streams_RnH: torch.Tensor, weights: MixWeights, *, eps: float, rms_eps: float) -> torch.Tensor:
    """V4's last collapse [R, n]: `fn` [n, n H], `base` [n], `scale` [1]."""
    return torch.sigmoid(_projection(streams_RnH, weights.fn, rms_eps) * weights.scale + weights.base) + eps


def sinkhorn(logits_Rnn: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic matrices: softmax over rows, then column and row normalisation in turn, columns last."""
    c = torch.softmax(logits_Rnn, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def collapse(streams_RnH: torch.Tensor, weights_Rn: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the streams, [R, H]."""
    return (weights_Rn.unsqueeze(-1) * streams_RnH).sum(1)


def rebuild(streams_RnH: torch.Tensor, out_RH: torch.Tensor, mixed: Mix) -> torch.Tensor:
    """Streams after a sublayer: post_i out + sum over j of comb[j, i] R_j."""
    kept = (mixed.comb.unsqueeze(-1) * streams_RnH.unsqueeze(2)).sum(1)
    return mixed.post.unsqueeze(-1) * out_RH.unsqueeze(1) + kept


def _projection(streams_RnH: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    flat = streams_RnH.flatten(1)
    return (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
