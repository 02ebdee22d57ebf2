"""`layers/triton/overlap.py` in plain PyTorch: how alike two distributions are, and the slope of that.

Draft and target draw with the same Gumbel noise. The target's token i is then the draft's too with chance 1 over the
sum over j of max(p_j, q_j p_i / q_i). Averaged over what the target draws this is the chance of a match. Here the
likeliest token counts by its chance, and any other that came as the one that was drawn.

Legend of shape suffixes: R rows, V vocabulary, C columns of a table of numbers a row.
"""

from __future__ import annotations

import torch


def likeness(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    wanted_R: torch.Tensor,
    heats_RC: torch.Tensor,
    *,
    cross: bool = True,
    match: bool = True,
) -> torch.Tensor:
    """[R, 2]: cross entropy of both at the first factor, and the chance of a match at the second and third; 0 for what
    is not asked for."""
    with torch.no_grad():
        return torch.stack(_both(scores_RV.float(), target_RV.float(), wanted_R, heats_RC, cross, match), 1)


def slope_(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    found_RC: torch.Tensor,
    weights_RC: torch.Tensor,
    wanted_R: torch.Tensor,
    *,
    cross: bool = True,
    match: bool = True,
) -> torch.Tensor:
    """The slope in the scores of: weights 0 times cross entropy over the first factor, less weights 1 times match."""
    with torch.enable_grad():
        s_RV = scores_RV.detach().float().requires_grad_()
        cross_R, match_R = _both(s_RV, target_RV.float(), wanted_R, heats_RC, cross, match)
        loss = (weights_RC[:, 0] * cross_R / heats_RC[:, 0] - weights_RC[:, 1] * match_R).sum()
        return torch.autograd.grad(loss, s_RV)[0].to(scores_RV.dtype)


def _both(
    s_RV: torch.Tensor, t_RV: torch.Tensor, wanted_R: torch.Tensor, heats_RC: torch.Tensor, cross: bool, match: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    both_R1, mine_R1, its_R1 = (heats_RC[:, column, None] for column in range(3))
    cross_R = -((t_RV * both_R1).softmax(-1) * (s_RV * both_R1).log_softmax(-1)).sum(-1)
    q_RV, p_RV = (s_RV * mine_R1).log_softmax(-1), (t_RV * its_R1).log_softmax(-1)

    def given(token_R: torch.Tensor) -> torch.Tensor:
        ratio_R1 = (p_RV - q_RV).gather(1, token_R[:, None]).clamp(-40, 40)
        return 1 / torch.maximum(p_RV, q_RV + ratio_R1).exp().sum(-1)

    likeliest_R = t_RV.argmax(-1)
    other_R = (wanted_R < s_RV.shape[1]) & (wanted_R != likeliest_R)
    match_R = p_RV.amax(-1).exp() * given(likeliest_R) + other_R * given(wanted_R.clamp(max=s_RV.shape[1] - 1))
    return cross_R * cross, match_R * match
