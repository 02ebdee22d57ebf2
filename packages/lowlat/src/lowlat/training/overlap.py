"""`layers/triton/overlap.py` in plain PyTorch: how alike two distributions are, and the slope of that.

Legend of shape suffixes: R rows, V vocabulary, C columns of a table of numbers a row.
"""

from __future__ import annotations

import torch


def likeness(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    *,
    cross: bool = True,
    overlap: bool = True,
) -> torch.Tensor:
    """[R, 2]: cross entropy of both at the first factor, and the overlap at the second and third; 0 for what is not
    asked for."""
    s_RV, t_RV = scores_RV.float(), target_RV.float()
    both_R1, mine_R1, its_R1 = (heats_RC[:, column, None] for column in range(3))
    cross_R = -((t_RV * both_R1).softmax(-1) * (s_RV * both_R1).log_softmax(-1)).sum(-1)
    overlap_R = torch.minimum((s_RV * mine_R1).softmax(-1), (t_RV * its_R1).softmax(-1)).sum(-1)
    return torch.stack([cross_R * cross, overlap_R * overlap], 1)


def slope_(
    scores_RV: torch.Tensor,
    target_RV: torch.Tensor,
    heats_RC: torch.Tensor,
    found_RC: torch.Tensor,
    weights_RC: torch.Tensor,
    *,
    cross: bool = True,
    overlap: bool = True,
) -> torch.Tensor:
    """The slope in the scores of: weights 0 times cross entropy over the first factor, less weights 1 times overlap."""
    s_RV, t_RV = scores_RV.float(), target_RV.float()
    both_R1, mine_R1, its_R1 = (heats_RC[:, column, None] for column in range(3))
    q_RV, p_RV = (s_RV * mine_R1).softmax(-1), (t_RV * its_R1).softmax(-1)
    below_RV = (q_RV < p_RV).float()
    lower_R1 = (q_RV * below_RV).sum(-1, keepdim=True)
    slope_RV = cross * weights_RC[:, :1] * ((s_RV * both_R1).softmax(-1) - (t_RV * both_R1).softmax(-1))
    slope_RV -= overlap * weights_RC[:, 1:] * mine_R1 * q_RV * (below_RV - lower_R1)
    return slope_RV.to(scores_RV.dtype)
