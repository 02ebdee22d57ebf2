"""What DeepSeek models see of a step beyond `StepInputs`: whose state a segment's rows belong to.

Legend of shape suffixes: R rows, L tokens of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowlat.layers.step import Segment, StepInputs


class StateSegment(Segment, kw_only=True):
    """Neighbouring rows of one request.

    `state`: row of the per-request state (windows, compressor rings, token history). Positions before `floor` are not
    in the windows. Compressed entries are written, and the draft's context grows, only from `write_from` on.
    """

    state: int

    @property
    def start(self) -> int:
        """Position of the first row."""
        return self.length - self.rows

    @property
    def span(self) -> slice:
        """The segment's rows in the step."""
        return slice(self.first, self.first + self.rows)


class RequestRows:
    """Rows of one request for `make_step`: tokens from position `start` on, in state row `state`.

    `slots` are the token slots of its pages, for all tokens up to the last row.
    """

    def __init__(
        self, tokens: Sequence[int], start: int, state: int, slots: torch.Tensor, *, floor: int = 0, write_from: int = 0
    ) -> None:
        self.tokens = list(tokens)
        self.start = start
        self.state = state
        self.slots = slots
        self.floor = floor
        self.write_from = write_from


def make_step(requests: Sequence[RequestRows], *, all_logits: bool = False) -> StepInputs:
    """A step of these rows; logits are wanted of each request's last row, or of all rows."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    samples: list[int] = []
    writes = []
    for request in requests:
        rows, end = len(request.tokens), request.start + len(request.tokens)
        segments.append(
            StateSegment(
                first=len(tokens),
                rows=rows,
                length=end,
                slots_L=request.slots[:end],
                run=-1,
                state=request.state,
                floor=request.floor,
                write_from=request.write_from,
            )
        )
        tokens += request.tokens
        positions += range(request.start, end)
        samples += range(len(tokens) - rows, len(tokens)) if all_logits else [len(tokens) - 1]
        writes.append(request.slots[request.start : end])
    return StepInputs(
        tokens_R=torch.tensor(tokens),
        positions_R=torch.tensor(positions),
        write_slots=torch.cat(writes),
        real_rows=len(tokens),
        segments=segments,
        decodes=[],
        sample_rows=torch.tensor(samples),
    )
