"""Bounded replay on the decoder side: the layers after the last KV source see only the last rows of a prefill.

Those layers keep nothing but windows, so only a window's worth of rows can matter to later tokens. The result is not
that of a full prefill: the first of the kept rows lack their predecessors in those layers' windows.

Legend of shape suffixes: R rows.
"""

from __future__ import annotations

import msgspec
import torch

from lowlat.models.deepseek_v4.attention import Rows
from lowlat.models.deepseek_v4.step import StateSegment


class Tail:
    """The rows of a step that are kept: `rows` describes them, `take` picks them."""

    def __init__(self, rows: Rows, kept_R: torch.Tensor, total: int) -> None:
        self.rows = rows
        self._kept_R = kept_R
        self._place_R = torch.full((total,), -1)
        self._place_R[kept_R] = torch.arange(len(kept_R))

    def take(self, x_R: torch.Tensor) -> torch.Tensor:
        """The kept rows of `x_R`."""
        return x_R.index_select(0, self._kept_R)

    def map(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows of the step are now."""
        return self._place_R[rows]


def tail_of(rows: Rows, keep: int, wanted: torch.Tensor) -> Tail:
    """The last `keep` rows of each segment, with its window beginning there when rows were dropped.

    Where logits are `wanted` of a row that would be dropped (log-probabilities of a prompt), none of its segment is.
    """
    segments: list[StateSegment] = []
    kept: list[torch.Tensor] = []
    for segment in rows.segments:
        dropped_end = segment.first + segment.rows - keep
        whole = bool(((wanted >= segment.first) & (wanted < dropped_end)).any())
        count = segment.rows if whole else min(keep, segment.rows)
        first_row = segment.first + segment.rows - count
        start = segment.length - count
        changes: dict[str, int] = {"first": sum(len(part) for part in kept), "rows": count}
        if count < segment.rows:
            changes["floor"] = max(segment.floor, start)
        segments.append(_changed(segment, changes))
        kept.append(torch.arange(first_row, first_row + count))
    kept_R = torch.cat(kept)
    left = Rows(rows.positions_R[kept_R], segments, {}, [], entries_written=True)
    return Tail(left, kept_R, len(rows.positions_R))


def _changed(segment: StateSegment, changes: dict[str, int]) -> StateSegment:
    return msgspec.structs.replace(segment, **changes)
