"""What the target has written lately, in one place of fixed size: steps draw their sequences from all of it.

Legend of shape suffixes: N sequences kept, S sequences of a step, T tokens of each, X taps * H, H hidden.
"""

from __future__ import annotations

import random

import torch

from lowlat.training.target import Written


class Bank:
    """The last writings, each of equally many sequences. Shorter sequences are padded in front."""

    def __init__(self, writings: int, tokens: int) -> None:
        """`tokens`: of the longest sequences."""
        self._writings, self._tokens = writings, tokens
        self._count = self._each = 0
        self.written: Written | None = None
        """All sequences [N, ...]; None: nothing was written yet."""

    def __len__(self) -> int:
        """Writings that are here."""
        return min(self._count, self._writings)

    def begin(self, number: int) -> None:
        """The next writing is number `number`: it gets the place that it has where all before it were put."""
        self._count = number

    def put(self, written: Written) -> None:
        """Keep a writing in the oldest one's place."""
        missing = self._tokens - written.tokens_ST.shape[1]
        if self.written is None:
            self._each = len(written.tokens_ST)
            self.written = Written(*(self._room_for(part, padded=part.dim() > 1, missing=missing) for part in written))
        first = self._count % self._writings * self._each
        for name, part in written._asdict().items():
            mine = getattr(self.written, name)[first : first + self._each]
            if part.dim() == 1:
                mine.copy_(part + missing if name in ("prompt_S", "begin_S") else part)
                continue
            mine[:, :missing] = name == "valid_ST"
            mine[:, missing:] = part
        self._count += 1

    def _room_for(self, part: torch.Tensor, *, padded: bool, missing: int) -> torch.Tensor:
        shape = [self._writings * self._each, *part.shape[1:]]
        if padded:
            shape[1] += missing
        return part.new_empty(shape)

    def draw(self, count: int, draw: random.Random) -> torch.Tensor:
        """Numbers [S] of sequences, from all writings in equal parts."""
        writings = len(self)
        order = draw.sample(range(writings), writings)
        rows: list[int] = []
        for index, writing in enumerate(order):
            share = count * (index + 1) // writings - count * index // writings
            rows += [writing * self._each + row for row in draw.sample(range(self._each), share)]
        assert self.written is not None
        return torch.tensor(rows).to(self.written.tokens_ST.device, non_blocking=True)

    def tokens(self) -> torch.Tensor:
        """All that the target chose, one after another."""
        assert self.written is not None
        tokens_NT, prompt_N = (
            part[: len(self) * self._each] for part in (self.written.tokens_ST, self.written.prompt_S)
        )
        return tokens_NT[torch.arange(tokens_NT.shape[1], device=tokens_NT.device) >= prompt_N[:, None]]
