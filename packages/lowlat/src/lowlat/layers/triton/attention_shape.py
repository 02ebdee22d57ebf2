"""Sizes of attention's launches, and how many registers a thread of them may have: chosen by shapes alone."""

from __future__ import annotations

import msgspec
import torch
import triton

from lowlat.layers.device_step import RowSegments


def lanes_of_warps() -> int:
    """Of the GPUs that this PyTorch is for."""
    return 64 if torch.version.hip else 32


class AttentionShape(msgspec.Struct, frozen=True):
    """Sizes of a launch that are fixed when its kernel is compiled."""

    block_q: int
    """Query rows of an item."""
    block_m: int
    """Rows of scores: query rows times heads of a group, as a power of two, at least 16."""
    block_l: int
    """Tokens that an item looks at in one turn."""
    warps: int
    stages: int
    """Of the loop over tiles that takes most of the time."""
    lean: int = 0
    """From how many whole tiles of a split on they are looked at without masks, with page numbers that were read a turn
    before. 0: never. Bits of results do not depend on it."""

    @property
    def masked_stages(self) -> int:
        """Of the loop over tiles with masks."""
        return 2 if self.lean else self.stages

    @classmethod
    def of(
        cls,
        group: int,
        most_rows: int,
        dim: int,
        element_bytes: int,
        *,
        segments: int = 1,
        lanes: int = 32,
        tight: bool = False,
        page_size: int = 0,
    ) -> AttentionShape:
        """For segments of up to `most_rows` rows whose key-value heads serve `group` query heads each, on a device with
        warps of `lanes`. Larger tiles than these spill registers (test_kernels_compile_attention.py). `page_size`: of
        segments whose rows see all tokens before them; else 0.
        """
        small = element_bytes > 2
        fitting = max(16, triton.next_power_of_2(group * most_rows))
        if most_rows == 1 or (tight and fitting <= 32):
            # Stages keep loads of later tokens in flight: two of them go to page numbers, the others to tiles. Many
            # segments keep enough in flight without (measured on an H200).
            stages = 2 if small or segments > 2 else 3 if dim > 128 or lanes > 32 or fitting > 16 else 5
            shape = cls(most_rows, fitting, 32 if small else 64, 4, stages)
            whole = most_rows == 1 and page_size > 0 and shape.block_l % page_size == 0
            if not whole or small or segments <= 2 or dim != 64 or lanes > 32 or fitting > 16:
                return shape
            # Many segments with heads of 64 take a tenth less behind many tokens; behind few, where a program less has
            # room on a processor, up to 9 % more (measured on an H200). Heads of 128 gain nothing.
            return msgspec.structs.replace(shape, stages=3, lean=2)
        # Two sizes only: every size is compiled when it first comes, which a request would wait for.
        least = max(16, triton.next_power_of_2(group))
        largest = 16 if small else 128 if dim <= 128 and lanes == 32 else 64
        block_m = least if most_rows <= least // group else max(least, largest)
        block_q = block_m // group
        return cls(block_q, block_m, 32 if small or dim > 128 else 64, 8 if block_m > 64 or dim > 128 else 4, 2)


def register_limit(
    segments: RowSegments, shape: AttentionShape, dim: int, element_bytes: int, *, plain: bool = True, lanes: int = 32
) -> int:
    """Most registers of a thread of `attend_kernel` for these segments; 0: as many as the compiler takes. Bits of
    results do not depend on it.

    By 128 a processor has room for four programs of heads of 128 instead of three. One or two segments, which have more
    tokens under way, and heads of 64 were slower so (measured on an H200). Not `plain` are windows, items and a draft's
    blocks, whose kernels would spill more. Warps of 64 `lanes` are AMD's, whose compiler knows no such limit.
    """
    many = segments.most_rows == 1 and len(segments.slots_B) > 2
    fits = 64 < dim <= 128 and element_bytes == 2 and shape.block_m == 16
    return 128 if many and fits and plain and lanes == 32 else 0
