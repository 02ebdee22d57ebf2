"""Sliding windows: a step as layers see it whose rows look at the last tokens of their request alone.

Legend of shape suffixes: R rows, B requests, L tokens seen.
"""

from __future__ import annotations

import msgspec
import torch

from lowlat.layers.step import DecodeGroup, Segment, StepInputs


def within_window(step: StepInputs, window: int) -> StepInputs:
    """The step without the tokens that none of its rows sees through a window of `window` tokens, its own included.

    That is the `windowed` step where there is one; else these layers' keys lie in the pages of the others. Computed
    once a step for all layers of that window. In segments of several rows the earlier rows still see too little or too
    much by a token each: `paged_attention` masks them by its own `window`.
    """
    if step.windowed is not None:
        return step.windowed
    segments = [_shorten(segment, window + segment.rows - 1) for segment in step.segments]
    decodes = [_narrow(group, step.positions_R, window) for group in step.decodes]
    return msgspec.structs.replace(step, segments=segments, decodes=decodes)


def _shorten(segment: Segment, length: int) -> Segment:
    skipped = segment.length - length
    if skipped <= 0:
        return segment
    run = segment.run + skipped if segment.run >= 0 else -1
    return Segment(segment.first, segment.rows, length, segment.slots_L[skipped:], run)


def _narrow(group: DecodeGroup, positions_R: torch.Tensor, window: int) -> DecodeGroup:
    longest = group.slots.shape[1]
    if longest <= window:
        return group
    last_B1 = positions_R.index_select(0, group.rows).unsqueeze(1)
    seen_BL = last_B1 - window + 1 + torch.arange(window, device=last_B1.device)
    outside_BL = seen_BL < 0
    # Where a request has fewer tokens than the window, its last one is read and masked: that slot was surely written.
    slots_BL = group.slots.gather(1, torch.where(outside_BL, last_B1, seen_BL))
    if group.mask is None:
        return DecodeGroup(group.rows, slots_BL, None)
    mask_BL = torch.zeros_like(group.mask[..., :window]).masked_fill_(outside_BL[:, None, None], float("-inf"))
    return DecodeGroup(group.rows, slots_BL, mask_BL)
