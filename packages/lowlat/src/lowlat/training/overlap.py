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
    """[R, 5]: cross entropy of both at the first factor, and the chance of a match at the second and third, 0 for what
    is not asked for; then what `parts` tells."""
    with torch.no_grad():
        cross_R, *told = _both(scores_RV.float(), target_RV.float(), wanted_R, heats_RC)
        best_R, other_R, chance_R = (of * match for of in told)
        return torch.stack([cross_R * cross, best_R + other_R, best_R, other_R, chance_R], 1)


def parts(
    found_RC: torch.Tensor, target_RV: torch.Tensor, heats_RC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of what `likeness` found with a match: the chance of a match with the likeliest token, that with another that
    came, and the likeliest one's own chance, [R] each."""
    best_R, other_R, chance_R = found_RC[:, 2:].unbind(1)
    return best_R, other_R, chance_R


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
    """The slope in the scores of: weights 0 times cross entropy over the first factor, less weights 1 and 2 times the
    match with the likeliest token and with another."""
    with torch.enable_grad():
        s_RV = scores_RV.detach().float().requires_grad_()
        cross_R, best_R, other_R, _ = _both(s_RV, target_RV.float(), wanted_R, heats_RC)
        loss_R = cross * weights_RC[:, 0] * cross_R / heats_RC[:, 0]
        loss_R = loss_R - match * (weights_RC[:, 1] * best_R + weights_RC[:, 2] * other_R)
        return torch.autograd.grad(loss_R.sum(), s_RV)[0].to(scores_RV.dtype)


def _both(
    s_RV: torch.Tensor, t_RV: torch.Tensor, wanted_R: torch.Tensor, heats_RC: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    both_R1, mine_R1, its_R1 = (heats_RC[:, column, None] for column in range(3))
    cross_R = -((t_RV * both_R1).softmax(-1) * (s_RV * both_R1).log_softmax(-1)).sum(-1)
    q_RV, p_RV = (s_RV * mine_R1).log_softmax(-1), (t_RV * its_R1).log_softmax(-1)

    def given(token_R: torch.Tensor) -> torch.Tensor:
        ratio_R1 = (p_RV - q_RV).gather(1, token_R[:, None]).clamp(-40, 40)
        return 1 / torch.maximum(p_RV, q_RV + ratio_R1).exp().sum(-1)

    likeliest_R, chance_R = t_RV.argmax(-1), p_RV.amax(-1).exp()
    other_R = (wanted_R < s_RV.shape[1]) & (wanted_R != likeliest_R)
    return cross_R, chance_R * given(likeliest_R), other_R * given(wanted_R.clamp(max=s_RV.shape[1] - 1)), chance_R
