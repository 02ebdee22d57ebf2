"""The tokens that top-k, top-p and min-p let pass, of many rows at once. The kernels are in `triton/filtering.py`.

Legend of shape suffixes: M samples of a step, V vocabulary.
"""

from __future__ import annotations

import torch


def keep_likely(
    scores_MV: torch.Tensor,
    temperature_M: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
    min_p_M: torch.Tensor,
) -> torch.Tensor:
    """The float32 scores with minus infinity where a token may not be drawn.

    The likeliest come first, of equal ones the lower token. Of these pass the first `top_k_M` (0: all), of those the
    fewest whose mass reaches `top_p_M` (1 or more: all), of those the ones at least `min_p_M` times as likely as the
    first; at least one. `temperature_M` is positive float32, `top_k_M` int64, the others float64.
    """
    best_M = scores_MV.amax(dim=-1)
    scaled_MV = (scores_MV - best_M[:, None]) / temperature_M[:, None]
    sorted_MV, ids_MV = scaled_MV.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(scaled_MV.shape[-1], device=scaled_MV.device)
    cut_MV = (place_V >= top_k_M[:, None]) & (top_k_M > 0)[:, None]
    probabilities_MV = sorted_MV.masked_fill(cut_MV, float("-inf")).softmax(-1, dtype=torch.float64)
    cumulative_MV = probabilities_MV.cumsum(-1)
    reached_M = torch.searchsorted(cumulative_MV, top_p_M[:, None])[:, 0] + 1
    kept_M = torch.where(top_p_M < 1.0, reached_M, len(place_V))
    kept_M = torch.where(top_k_M > 0, kept_M.minimum(top_k_M), kept_M)
    likely_M = (probabilities_MV >= (min_p_M * probabilities_MV[:, 0])[:, None]).sum(-1)
    kept_M = torch.where(min_p_M > 0.0, kept_M.minimum(likely_M), kept_M).clamp(1, len(place_V))
    removed_MV = torch.empty_like(cut_MV).scatter_(1, ids_MV, place_V >= kept_M[:, None])
    return scores_MV.masked_fill(removed_MV, float("-inf"))
