"""How the dense step's stages wait for what other blocks publish.

Blocks poll each other's words. A poll takes a few hundred cycles, and much longer while the memory sends units of the
cache to the same block; polls of what cannot be there yet also hold up what is published. So a stage lets some time go
by before it looks for the first time. How much, and what it looks at then, was measured (docs/kernels/dense.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

QKV, HEADS, SPLITS, OUTPUT, GATE_UP, DOWN = 0, 2, 3, 4, 5, 6
"""Stages that wait for other blocks, by the numbers that the kernel gives them (`step.STAGES`)."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Of a kernel. Pauses are in hundreds of cycles, by stage, from when it begins to wait.

    `busy` counts where units of the next layer are on their way when attention ends: behind many tokens with one row,
    and with several, at most `busy_rows`, where no row has a warp to itself. `quiet` counts elsewhere. Stages in
    `whole` then poll all that they need, others one vector of it until that is there.
    """

    quiet: Mapping[int, int] = field(default_factory=dict)
    busy: Mapping[int, int] = field(default_factory=dict)
    whole: tuple[int, ...] = ()
    busy_rows: int = 8


def packed(pauses: Mapping[int, int]) -> int:
    """A byte for each stage. Raises ValueError for a pause that is none."""
    if not all(0 <= stage < 8 and 0 <= pause < 256 for stage, pause in pauses.items()):
        raise ValueError(f"pauses are {dict(pauses)}; of stages 0 to 7, 0 to 255 hundred cycles")
    return sum(pause << 8 * stage for stage, pause in pauses.items())


def measured(*, one_row: bool, narrow: bool, wide_of_64: bool, widest: bool) -> Waits:
    """For steps of one row or of several: of narrow models (measured on Qwen3-0.6B), wide ones with heads of 64
    (Llama-3.2-1B), the `widest` (Qwen3-8B), and others between them, which have not been measured.
    """
    if narrow and one_row:
        quiet = {HEADS: 3, SPLITS: 4, GATE_UP: 8, DOWN: 4}
        return Waits(quiet, {HEADS: 7, SPLITS: 13}, (SPLITS, GATE_UP))
    if narrow:
        busy = {QKV: 6, HEADS: 2, SPLITS: 9, OUTPUT: 3, GATE_UP: 4}
        return Waits({OUTPUT: 4, GATE_UP: 2}, busy, (QKV, GATE_UP))
    if one_row:
        pauses = {QKV: 22, GATE_UP: 4, DOWN: 15}
        return Waits(pauses | {SPLITS: 2}, pauses | {SPLITS: 10}, (QKV, GATE_UP, DOWN))
    if wide_of_64:
        pauses = {QKV: 18, OUTPUT: 4, GATE_UP: 4}
        return Waits(pauses, pauses | {SPLITS: 8}, (QKV, GATE_UP))
    # The longer a stage streams, the later its last block publishes: a model between would only wait.
    quiet = {QKV: 15, OUTPUT: 22, GATE_UP: 15, DOWN: 27} if widest else {}
    return Waits(quiet, {QKV: 7, SPLITS: 10}, busy_rows=2)
