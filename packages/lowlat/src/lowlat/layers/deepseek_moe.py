"""Mixture of experts with square-root-softplus scores, a selection bias, and clamped SwiGLU.

Legend of shape suffixes: R rows, H hidden, E experts, K experts a row, I inner part of this rank.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F

from lowlat.layers.deepseek_numerics import Numerics, Weight, multiply, operand, project


class Expert(msgspec.Struct):
    """`gate` (w1) and `up` (w3) [I, H], `down` (w2) [H, I]."""

    gate: Weight
    up: Weight
    down: Weight


def route(
    logits_RE: torch.Tensor,
    count: int,
    scale: float,
    *,
    bias_RE: torch.Tensor | None = None,
    chosen_RK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and weights, each [R, K]: the best of sqrt(softplus(logit)) + bias, or the given `chosen_RK`.

    Weights are the scores without bias, normalised to a sum of `scale`. Ties go to the lower id.
    """
    scores_RE = F.softplus(logits_RE, threshold=1e9).sqrt()
    if chosen_RK is None:
        ranked_RE = scores_RE if bias_RE is None else scores_RE + bias_RE
        chosen_RK = torch.sort(ranked_RE, dim=-1, descending=True, stable=True).indices[:, :count]
    picked_RK = scores_RE.gather(1, chosen_RK)
    return chosen_RK, picked_RK / (picked_RK.sum(-1, keepdim=True) + 1e-20) * scale


def expert_output(
    x_RH: torch.Tensor, expert: Expert, limit: float, numerics: Numerics, weights_R: torch.Tensor | None = None
) -> torch.Tensor:
    """(weight silu(min(x w1, limit)) clamp(x w3, -limit, limit)) w2 on this rank's inner part; not rounded.

    `x_RH` is the `operand` of w1 and w3. The routing weight enters before w2: this matters only for the rounding of
    quantised activations.
    """
    gate_RI = numerics.store(multiply(x_RH, expert.gate, numerics)).clamp(max=limit)
    up_RI = numerics.store(multiply(x_RH, expert.up, numerics)).clamp(-limit, limit)
    hidden_RI = F.silu(gate_RI) * up_RI
    if weights_R is not None:
        hidden_RI = weights_R.unsqueeze(1) * hidden_RI
    return project(hidden_RI, expert.down, numerics)


def mixture(
    x_RH: torch.Tensor,
    ids_RK: torch.Tensor,
    weights_RK: torch.Tensor,
    experts: list[Expert],
    shared: Expert,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """Sum of the chosen experts and the shared one on this rank's inner part, [R, H], not rounded.

    A row's experts are added in the order of their ids, so its sum does not depend on other rows.
    """
    out_RH = torch.zeros_like(x_RH)
    routed_RH, shared_RH = (operand(x_RH, expert.gate, numerics) for expert in (experts[0], shared))
    for index in sorted(set(ids_RK.flatten().tolist())):
        rows, place = (ids_RK == index).nonzero(as_tuple=True)
        part = expert_output(routed_RH[rows], experts[index], limit, numerics, weights_RK[rows, place])
        out_RH.index_add_(0, rows, part)
    return out_RH + expert_output(shared_RH, shared, limit, numerics)
