"""Prompt lookup on the device: guesses are what followed the same tokens before in the slot's own conversation.

Legend of shape suffixes: B padded requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowlat.layers.device_step import DeviceOps
from lowlat.layers.verify import SlotTables
from lowlat.speculative.device_draft import DeviceDraft, Guesses, Settings
from lowlat.speculative.ngram import SURE_RUN

_SPARE = 16
"""Places behind the longest context, for rows of guesses beyond it."""


class NgramDraft:
    """Keeps the slots' tokens on the device and looks them up. The steps that check guesses write what they choose.

    Beside another draft, runs of `SURE_RUN` tokens go before its guesses.
    """

    def __init__(
        self,
        ops: DeviceOps,
        tables: SlotTables,
        tokens: int,
        send: Callable[[Sequence[int]], torch.Tensor],
        beside: DeviceDraft | None = None,
    ) -> None:
        """`tokens`: of the longest context. `send`: a list as int32 on the device, without a wait."""
        self._ops, self._tables, self._send, self.beside = ops, tables, send, beside
        slots = len(tables.tokens_T)
        device = tables.tokens_T.device
        tables.history_TL = torch.zeros(slots, tokens + _SPARE, dtype=torch.int32, device=device)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request with these tokens takes a batch slot."""
        assert self._tables.history_TL is not None
        self._tables.history_TL[slot, : len(tokens)].copy_(self._send(tokens), non_blocking=True)

    def propose(self, slots_B: torch.Tensor, count: int, longest: int, settings: Settings) -> Guesses:
        """See `DeviceDraft`."""
        if self.beside is None:
            return self._ops.find_again(slots_B, self._tables, count)
        others_BG, known_B = self.beside.propose(slots_B, count, longest, settings)
        assert known_B is None, "it guesses always"
        return self._ops.find_again(slots_B, self._tables, count, SURE_RUN, others_BG)[0], None
