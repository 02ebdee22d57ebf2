"""Which proposals of a block are kept, and which token follows them.

Legend of shape suffixes: Q requests, L proposals, M = L + 1 verify rows, V vocabulary.

Row i of a verify step gives the target's distribution of the token after proposal i (row 0: after the anchor).
"""

from __future__ import annotations

import msgspec
import torch


class Verdict(msgspec.Struct):
    """`accepted` [Q]: how many proposals of each request are kept; `token` [Q]: the one that follows them."""

    accepted: torch.Tensor
    token: torch.Tensor


def verify_greedy(drafts_QL: torch.Tensor, logits_QMV: torch.Tensor) -> Verdict:
    """Keep proposals while each is the target's most likely token."""
    best_QM = logits_QMV.argmax(-1)
    accepted_Q = _leading(drafts_QL == best_QM[:, :-1])
    return Verdict(accepted_Q, best_QM.gather(1, accepted_Q.unsqueeze(1)).squeeze(1))


def verify_sampled(
    drafts_QL: torch.Tensor,
    draft_QLV: torch.Tensor,
    target_QMV: torch.Tensor,
    uniforms_QL: torch.Tensor,
    choice_Q: torch.Tensor,
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): the tokens kept have exactly the target's law.

    Args:
        drafts_QL: proposals, drawn from `draft_QLV`.
        draft_QLV: the distributions that they were drawn from; one-hot where the draft chose without chance.
        target_QMV: the target's distributions.
        uniforms_QL: numbers in [0, 1) that decide on acceptance, one for each proposal.
        choice_Q: numbers in [0, 1) that draw the token after the kept ones; independent of all others.
    """
    target_QL = target_QMV[:, :-1].gather(2, drafts_QL.unsqueeze(2)).squeeze(2)
    draft_QL = draft_QLV.gather(2, drafts_QL.unsqueeze(2)).squeeze(2)
    accepted_Q = _leading(uniforms_QL * draft_QL < target_QL)
    at_Q11 = accepted_Q.view(-1, 1, 1).expand(-1, 1, target_QMV.shape[2])
    target_QV = target_QMV.gather(1, at_Q11).squeeze(1)
    # After the last row there is no proposal to take the mass away from.
    draft_QMV = torch.nn.functional.pad(draft_QLV, (0, 0, 0, 1))
    left_QV = (target_QV - draft_QMV.gather(1, at_Q11).squeeze(1)).clamp_min(0)
    # Rounding can leave nothing where target and draft agree; the target's own law is then right.
    empty_Q1 = left_QV.sum(-1, keepdim=True) <= 0
    return Verdict(accepted_Q, _draw(torch.where(empty_Q1, target_QV, left_QV), choice_Q))


def _leading(kept_QL: torch.Tensor) -> torch.Tensor:
    """How many leading entries are true."""
    return kept_QL.to(torch.int64).cumprod(1).sum(1)


def _draw(weights_QV: torch.Tensor, choice_Q: torch.Tensor) -> torch.Tensor:
    """Draw from weights that need not add up to one; never a token of weight 0."""
    total_QV = weights_QV.to(torch.float64).cumsum(-1)
    aim_Q1 = (choice_Q.to(torch.float64) * total_QV[:, -1]).unsqueeze(1)
    drawn_Q = torch.searchsorted(total_QV, aim_Q1, right=True).squeeze(1)
    places = torch.arange(weights_QV.shape[1], device=weights_QV.device)
    last_Q = torch.where(weights_QV > 0, places, 0).amax(-1)
    return torch.minimum(drawn_Q, last_Q)
