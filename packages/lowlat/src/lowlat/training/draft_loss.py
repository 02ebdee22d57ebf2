"""What a block draft learns: the target's own next tokens, from every place at once.

Legend of shape suffixes: S sequences, T tokens, A anchors of a sequence, Q = S * A blocks, B rows of a block, P
guesses of a block, H hidden, N query heads, K key-value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lowlat.speculative.draft_heads import edge_scores
from lowlat.speculative.draft_network import Attend, DraftNetwork, capped
from lowlat.training.target import Written

_FADING = 4.0
"""Guess i weighs exp(-i / this): it is of use only if those before it were right."""
_NEVER = -1e4
"""Score of what is no candidate."""
_CONFIDENCE = 0.2
"""Weight of the confidence head's loss."""


class Blocks(NamedTuple):
    """Scores of guesses beside the tokens that came. What is not `known` lies behind a sequence's end."""

    scores_QPV: torch.Tensor
    wanted_QP: torch.Tensor
    known_QP: torch.Tensor
    confidence_QP: torch.Tensor | None = None
    """Before the sigmoid."""
    unary_QPV: torch.Tensor | None = None
    """Of DFlash 2, whose `scores_QPV` are those of candidates alone: the logits that candidates come from."""

    def right(self) -> torch.Tensor:
        """[Q, P]: whether each guess is right and those before it are too."""
        return (self.scores_QPV.argmax(-1) == self.wanted_QP).cumprod(-1).bool()


def blocks(
    network: DraftNetwork,
    embed: Callable[[torch.Tensor], torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
    written: Written,
    anchors_SA: torch.Tensor,
) -> Blocks:
    """The draft's scores after each anchor (places of tokens), each guess given that those before it were right."""
    config = network.config
    sequences, anchors = anchors_SA.shape
    tokens_ST, device = written.tokens_ST, written.tokens_ST.device
    length = written.features_STX.shape[1]
    positions = torch.arange(length, device=device)
    context = network.context(written.features_STX.flatten(0, 1), positions.repeat(sequences))
    places_SAB = anchors_SA[..., None] + torch.arange(config.block_size, device=device)
    input_QB = torch.full((sequences * anchors, config.block_size), config.mask_token_id, device=device)
    input_QB[:, 0] = tokens_ST.gather(1, anchors_SA).flatten()
    x_QBH = embed(input_QB.flatten()).view(*input_QB.shape, -1)
    attend = _attend(context, anchors_SA, config.block_size, length, config.sliding_window)
    h_QBH = network.block(x_QBH, places_SAB.flatten(0, 1), attend)
    first = 0 if config.kind == "dspark" else 1
    h_QPH = h_QBH[:, first:]
    wanted_SAP = anchors_SA[..., None] + 1 + torch.arange(config.proposals, device=device)
    known_QP = (wanted_SAP < tokens_ST.shape[1]).flatten(0, 1)
    wanted_SX = wanted_SAP.clamp(max=tokens_ST.shape[1] - 1).flatten(1)
    known_QP &= written.valid_ST.gather(1, wanted_SX).view_as(known_QP)
    wanted_QP = tokens_ST.gather(1, wanted_SX).view_as(known_QP)
    before_QP = torch.cat([input_QB[:, :1], wanted_QP[:, :-1]], 1)
    normed_QPH = network.norm(h_QPH)
    logits_QPV = capped(head(normed_QPH.flatten(0, 1)), config).view(*wanted_QP.shape, -1)
    confidence_QP = unary_QPV = None
    if config.kind == "dspark":
        before_QPE = network.markov_embed(before_QP)
        logits_QPV = logits_QPV + network.markov_head(before_QPE)
        confidence_QP = network.confidence_head(torch.cat([h_QPH.detach(), before_QPE.detach()], -1))[..., 0]
    if config.kind == "dflash2":
        flat = (logits_QPV.flatten(0, 1), normed_QPH.flatten(0, 1), before_QP.flatten())
        scores, candidates = edge_scores(network, *flat)
        unary_QPV = logits_QPV
        logits_QPV = torch.full_like(flat[0], _NEVER).scatter(1, candidates, scores).view_as(logits_QPV)
    return Blocks(logits_QPV, wanted_QP, known_QP, confidence_QP, unary_QPV)


def loss_of(found: Blocks) -> torch.Tensor:
    """Cross entropy that fades along the block, and the confidence head's own."""
    places = torch.arange(found.wanted_QP.shape[1], device=found.wanted_QP.device)
    weights_QP = torch.exp(-places / _FADING) * found.known_QP
    each_QP = _entropy(found.scores_QPV, found.wanted_QP)
    if found.unary_QPV is not None:
        chosen_QP = found.scores_QPV.gather(2, found.wanted_QP[..., None])[..., 0] > _NEVER
        # What is no candidate counts as the worst of them, and teaches the logits alone.
        worst_QP = (found.scores_QPV > _NEVER).sum(-1).log()
        each_QP = _entropy(found.unary_QPV, found.wanted_QP) + torch.where(chosen_QP, each_QP, worst_QP)
    loss = (each_QP * weights_QP).sum() / weights_QP.sum().clamp(min=1e-6)
    if found.confidence_QP is not None:
        right_QP = found.right()
        # Its question is asked only where the guesses before were right.
        asked_QP = F.pad(right_QP[:, :-1], (1, 0), value=True) & found.known_QP
        each_QP = F.binary_cross_entropy_with_logits(found.confidence_QP, right_QP.float(), reduction="none")
        loss = loss + _CONFIDENCE * (each_QP * asked_QP).sum() / asked_QP.sum().clamp(min=1)
    return loss


def _entropy(scores_QPV: torch.Tensor, wanted_QP: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(scores_QPV.flatten(0, 1), wanted_QP.flatten(), reduction="none")
    return each.view_as(wanted_QP)


def _attend(
    context: list[tuple[torch.Tensor, torch.Tensor]], anchors_SA: torch.Tensor, block: int, length: int, window: int
) -> Attend:
    """Rows of a block see their sequence's tokens before the anchor, and their own block."""
    sequences, anchors = anchors_SA.shape
    device = anchors_SA.device
    places = torch.arange(length, device=device)
    seen_SAT = places < anchors_SA[..., None]
    if window:
        seen_SAT &= places >= anchors_SA[..., None] - window
    own_AA = torch.eye(anchors, dtype=torch.bool, device=device).repeat_interleave(block, 0).repeat_interleave(block, 1)
    mask_SXY = torch.cat([seen_SAT.repeat_interleave(block, 1), own_AA.expand(sequences, -1, -1)], 2)

    def attend(layer: int, q_QBND: torch.Tensor, k_QBKD: torch.Tensor, v_QBKD: torch.Tensor) -> torch.Tensor:
        def whole(part_RKD: torch.Tensor, own_QBKD: torch.Tensor) -> torch.Tensor:
            heads, dim = own_QBKD.shape[2:]
            parts = [part_RKD.view(sequences, length, heads, dim), own_QBKD.reshape(sequences, -1, heads, dim)]
            return torch.cat(parts, 1).transpose(1, 2).repeat_interleave(q_QBND.shape[2] // heads, 1)

        keys, values = context[layer]
        q_SNXD = q_QBND.reshape(sequences, anchors * block, *q_QBND.shape[2:]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q_SNXD, whole(keys, k_QBKD), whole(values, v_QBKD), attn_mask=mask_SXY[:, None]
        )
        return mixed.transpose(1, 2).reshape(q_QBND.shape)

    return attend
