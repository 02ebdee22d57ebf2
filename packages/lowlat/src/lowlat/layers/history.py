"""Guesses from what followed the same tokens before (prompt lookup, Saxena 2023), on the device.

What the kernels in `triton/history.py` are compared with, and what runs where there are no kernels.

Legend of shape suffixes: B padded requests, G guesses, T batch slots with the padding slot last, L tokens of a slot.
"""

from __future__ import annotations

import torch

from lowlat.layers.verify import SlotTables

LONGEST = 6
"""Tokens of the run that is looked for, at most."""


def find_again(
    slots_B: torch.Tensor, tables: SlotTables, count: int, shortest: int = 1, others_BG: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What followed the latest occurrence of the longest run of `shortest` to `LONGEST` tokens that ends each slot's
    tokens and occurred before. A repetition shorter than `count` runs into its own continuation.

    Returns guesses [B, count], int64, and their number [B]: 0 where nothing like the end was seen before, unless there
    are `others_BG` to take then.
    """
    history_TL = tables.history_TL
    assert history_TL is not None
    end_B = tables.lengths_T[slots_B]
    history_BL = history_TL[slots_B].long()
    places_L = torch.arange(history_BL.shape[1], device=slots_B.device)
    history_BL = torch.where(places_L == end_B[:, None], tables.tokens_T[slots_B][:, None], history_BL)
    alive_BL = places_L < end_B[:, None]
    runs_BL = torch.zeros_like(history_BL)
    for back in range(LONGEST):
        mine_B1 = history_BL.gather(1, (end_B - back).clamp(min=0)[:, None])
        alive_BL = alive_BL & (places_L >= back) & (history_BL.roll(back, 1) == mine_B1)
        runs_BL += alive_BL
    best_B, place_B = (runs_BL * len(places_L) + places_L).max(1)
    found_B = best_B >= shortest * len(places_L)
    place_B = place_B.where(found_B, -1)
    ahead_G = torch.arange(count, device=slots_B.device)
    source_BG = place_B[:, None] + 1 + ahead_G % (end_B - place_B)[:, None].clamp(min=1)
    guesses_BG = history_BL.gather(1, source_BG.clamp(max=len(places_L) - 1))
    if others_BG is None:
        return guesses_BG * found_B[:, None], count * found_B
    return guesses_BG.where(found_B[:, None], others_BG), torch.full_like(slots_B, count)
