"""Guessing a token whose random number is known.

A token is drawn where its distribution function reaches a number that depends on seed and position alone, so a draft
knows the number too. Its own distribution is not quite the target's: a small token that the number hits by a hair is
less likely the one than a large neighbour. So the guess is the token with the largest share of a stretch around the
number, which is the likeliest token for a wide stretch and the drawn one for a narrow one.
"""

from __future__ import annotations

import torch

SPREAD = 0.3
"""Half the stretch: about how far a trained draft's distribution function is from its target's."""


def coupled_guess(cumulative: torch.Tensor, number: torch.Tensor | float, spread: float = SPREAD) -> torch.Tensor:
    """Index of the guess. `cumulative` is a distribution function over the last dimension, `number` in its range."""
    before = torch.nn.functional.pad(cumulative[..., :-1], (1, 0))
    share = cumulative.clamp(max=number + spread) - before.clamp(min=number - spread)
    return share.argmax(-1)
