"""Where the blocks of a step begin.

Legend of shape suffixes: S sequences, T tokens of each, A anchors of a sequence.
"""

from __future__ import annotations

import torch

SPAN = 192
"""Tokens at a prompt's end that can be anchors."""


def draw_anchors(
    valid_ST: torch.Tensor,
    prompt_S: torch.Tensor,
    begin_S: torch.Tensor,
    count: int,
    generator: torch.Generator,
    texts: int = 0,
) -> torch.Tensor:
    """Places [S, A] of anchors: the last token of the prompt, or a token of the answer before its end; the last
    `texts` of them tokens of the prompt, if that is long."""
    first_S = prompt_S - 1
    lengths_S = (valid_ST.sum(1) - 2).clamp(max=valid_ST.shape[1] - 2).maximum(first_S)
    random_SA = torch.rand(len(first_S), count, generator=generator, device=first_S.device)
    places_SA = first_S[:, None] + (random_SA * (lengths_S - first_S + 1)[:, None]).long()
    in_text_SA = (first_S - SPAN)[:, None] + (random_SA * SPAN).long()
    is_text_SA = (torch.arange(count, device=first_S.device) >= count - texts) & (first_S - begin_S >= SPAN)[:, None]
    return torch.where(is_text_SA, in_text_SA, places_SA)
