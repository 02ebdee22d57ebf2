"""How many guesses of a block a step accepts on average, from the chances that draft and target draw the same tokens.

Legend of shape suffixes: Q blocks, P guesses of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_LEAST_CHANCE = 1e-9
"""Where one divides by it."""


def accepted(
    best_QP: torch.Tensor,
    other_QP: torch.Tensor,
    chance_QP: torch.Tensor,
    counts_QP: torch.Tensor,
    drawn_QP: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens that blocks accept [Q], and its slopes in the first two [Q, P].

    The engine accepts a guess where the target draws the same token, and the guesses before it were right. With tokens
    w drawn from the target and g(w) the chance that the draft draws what the target drew, which was w, the first k
    guesses are right with the chance g(w_1) ... g(w_k): what comes after a token depends on it, so chances before the
    last belong to the tokens that came. The last one's may be any of the same mean; its m, below, varies less.

    Args:
        best_QP: the likeliest token's chance b times g(b).
        other_QP: g(w) where w is another, else 0. Averaged over w, the sum of both, m, is the chance of a match.
        chance_QP: the likeliest token's chance.
        counts_QP: places that count.
        drawn_QP: whose chance before others is that of the token that came; elsewhere it is m, as if what comes after
            did not depend on it.
    """
    match_QP = (best_QP + other_QP) * counts_QP
    same_QP = drawn_QP & (other_QP == 0)
    given_QP = torch.where(same_QP, best_QP / chance_QP.clamp(min=_LEAST_CHANCE), other_QP) * counts_QP
    given_QP = torch.where(drawn_QP, given_QP, match_QP)
    before_QP = F.pad(given_QP[:, :-1].cumprod(1), (1, 0), value=1.0)
    reached_QP = before_QP * match_QP
    later_QP = F.pad(reached_QP.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1)) / given_QP.clamp(min=_LEAST_CHANCE)
    slope_best_QP = torch.where(drawn_QP, same_QP * later_QP / chance_QP.clamp(min=_LEAST_CHANCE), later_QP)
    slope_other_QP = torch.where(same_QP, 0.0, later_QP)
    return reached_QP.sum(1), (before_QP + slope_best_QP) * counts_QP, (before_QP + slope_other_QP) * counts_QP
