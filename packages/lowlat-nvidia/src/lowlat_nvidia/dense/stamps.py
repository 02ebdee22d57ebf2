"""When the parts of a dense step ran: the same launch with time stamps in it, read as one timeline.

Suffixes: B blocks, L layers, S stamps of a layer.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor

from lowlat_nvidia.dense.plan import MAX_ROWS
from lowlat_nvidia.dense.step import DenseStep, load_kernels
from lowlat_plugin import Part

STAMPS = 16
"""Room for the stamps of a layer, as the kernel numbers them."""

WAIT = "exchange"
ORDER = (
    (0, "qkv", WAIT), (1, "qkv", ""), (2, "attention", WAIT), (10, "attention", ""), (3, "combine", ""),
    (4, "attention output", WAIT), (5, "attention output", ""), (6, "gate and up", WAIT), (9, "gate and up", ""),
    (7, "down", WAIT), (8, "down", ""),
)  # fmt: skip
"""Stamps in the order of time: number, the part that begins or goes on there, and whether it waits for other blocks."""

_HEAD, _HEAD_END, _BEGAN, _ENDED = 0, 1, 2, 4
"""Behind the last layer: logits begin and end; cycles and nanoseconds at which a block began and ended."""


def stamped(step: DenseStep) -> DenseStep:
    """A twin with time stamps, in the same memory: either may run the next step."""
    twin = copy.copy(step)
    twin.plan = dataclasses.replace(step.plan, stamps=STAMPS)
    twin.functions, twin.log = load_kernels([twin.plan.kernel(1), twin.plan.kernel(MAX_ROWS)])
    blocks, layers, _ = step.stamps.shape
    twin.stamps = torch.zeros((blocks, layers, STAMPS), dtype=torch.int64, device=step.stamps.device)
    return twin


def read_parts(stamps_BLS: Tensor) -> list[Part]:
    """The timeline of the last step in microseconds: between two stamps all blocks' mean, from the first block's
    beginning to the last one's end. Parts of a layer lie in it, and waits in the parts.
    """
    stamps_BLS = stamps_BLS.cpu()
    clocks_B4 = stamps_BLS[:, -1, _BEGAN : _ENDED + 2]
    first = int(clocks_B4[:, 1].min())
    began_B, ended_B = clocks_B4[:, 0], clocks_B4[:, 2]
    start_B, end_B = ((clocks_B4[:, i] - first).double() / 1e3 for i in (1, 3))
    scale_B = (end_B - start_B) / (ended_B - began_B)

    def times(cycles_BX: Tensor) -> Tensor:
        offsets_BX = (cycles_BX.flatten(1) - began_B.unsqueeze(1)).double() * scale_B.unsqueeze(1)
        return (start_B.unsqueeze(1) + offsets_BX).mean(0).view(cycles_BX.shape[1:])

    order = [number for number, _, _ in ORDER]
    layers = times(stamps_BLS[:, :-1, order]).tolist()
    head, head_end = times(stamps_BLS[:, -1, [_HEAD, _HEAD_END]]).tolist()
    parts = [Part("start", 0.0, layers[0][0], 1)]
    for marks, after in zip(layers, [*(following[0] for following in layers[1:]), head], strict=True):
        parts += _layer(marks, after)
    return [*parts, Part("head", head, head_end, 1), Part("finish", head_end, float(end_B.max()), 1)]


ATTENTION = ((2, "begin"), (10, "heads"), (12, "units"), (13, "join"), (11, "other warps"))
"""Stamps inside attention of a block's first warp, in the order of time, and what ends there: of several rows the last
one's units and join, where rows take turns; its own where each row has a warp."""


def attention_us(stamps_BLS: Tensor) -> dict[str, float]:
    """Microseconds inside attention of the last step, mean over blocks and layers."""
    stamps_BLS = stamps_BLS.cpu()
    clocks_B4 = stamps_BLS[:, -1, _BEGAN : _ENDED + 2].double()
    scale_B = (clocks_B4[:, 3] - clocks_B4[:, 1]) / (clocks_B4[:, 2] - clocks_B4[:, 0]) / 1e3
    inside_BLX = stamps_BLS[:, :-1, [number for number, _ in ATTENTION]].double()
    took_X = (inside_BLX.diff(dim=2) * scale_B.view(-1, 1, 1)).mean((0, 1))
    return dict(zip((name for _, name in ATTENTION[1:]), took_X.tolist(), strict=True))


def head_cycles(stamps_BLS: Tensor) -> Tensor:
    """Cycles [B] that each block took for the logits: how multiprocessors share the memory."""
    return (stamps_BLS[:, -1, _HEAD_END] - stamps_BLS[:, -1, _HEAD]).cpu()


def _layer(marks: list[float], after: float) -> list[Part]:
    parts = [Part("layer", marks[0], after, 1)]
    names = [name for _, name, _ in ORDER]
    ends = [*marks[1:], after]
    for place, ((_, name, wait), begin, end) in enumerate(zip(ORDER, marks, ends, strict=True)):
        if place == 0 or names[place - 1] != name:
            last = max(index for index, other in enumerate(names) if other == name)
            parts.append(Part(name, begin, ends[last], 2))
        if wait:
            parts.append(Part(wait, begin, end, 3))
    return parts
