"""What each row of a step is, read on the host as the kernel reads it on the device (`read_rows` in rows.cuh).

Suffixes: P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.dense.step import StepTensors


@dataclass(slots=True)
class StepRow:
    """One row. `source` is the row whose inputs it has: itself, or for padding the first real one.

    `first` is the first row of the same request in the step, `cached` the tokens before that, `position` the row's own
    place, and `pages_P` the request's page numbers, int64. `real` is false where all rows of the step are padding: such
    rows compute one token at position 0 and write to a scratch.
    """

    source: int
    token: int
    position: int
    first: int
    cached: int
    pages_P: Tensor
    real: bool

    def slots(self, page_size: int) -> Tensor:
        """KV slots of tokens 0 to `position`, int64."""
        tokens = torch.arange(self.position + 1, device=self.pages_P.device)
        return self.pages_P[tokens // page_size] * page_size + tokens % page_size


def rows_of(step: StepTensors) -> list[StepRow]:
    """Every row of a step."""
    count = len(step.tokens_R)
    real = [True] * count if step.write_slots_R is None else (step.write_slots_R >= 0).tolist()
    starts, positions, tokens = (t.tolist() for t in (step.query_start_Q1, step.positions_R, step.tokens_R))
    tables = range(len(starts) - 1) if step.table_rows_Q is None else step.table_rows_Q.tolist()
    rows = []
    for row in range(count):
        source = row if real[row] else real.index(True) if any(real) else 0
        request = sum(start <= source for start in starts[1:-1])
        first, pages_P = starts[request], step.page_table_TP[tables[request]].long()
        if any(real):
            rows.append(StepRow(source, tokens[source], positions[source], first, positions[first], pages_P, True))
        else:
            rows.append(StepRow(source, tokens[source], 0, first, 0, torch.zeros_like(pages_P), False))
    return rows
