"""What a device keeps of every batch slot between steps: newest token, length, page table, sampling settings.

The host sends changes; it never reads any of this. One more slot than the batch has exists for padding rows: its length
stays 0 and its pages are all the padding page, which no request ever reads.

Legend of shape suffixes: T slots with the padding slot last, P pages of a slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowlat.cache.layout import KVLayout
from lowlat.engine.batch import MIN_TEMPERATURE, PlanLimits, SlotSampling
from lowlat.layers.verify import NO_END, SlotTables


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of host values on the device. From pinned memory where there is a GPU, so that nobody waits: PyTorch
    keeps that memory until the copy is done."""
    if device.type == "cpu":
        return torch.as_tensor(values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


class RuleState:
    """Logit rules of every slot, spelled out over the vocabulary: memory is slots times vocabulary times ten bytes, so
    it is made when the first request with a rule comes."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        shape = (slots, vocabulary)
        self._device = device
        self.bias_TV = torch.zeros(shape, dtype=torch.float32, device=device)
        self.counts_TV = torch.zeros(shape, dtype=torch.int32, device=device)
        """How often the answer holds each token."""
        self.prompt_TV = torch.zeros(shape, dtype=torch.bool, device=device)
        self.banned_TV = torch.zeros(shape, dtype=torch.bool, device=device)
        self.banned_until_T = torch.zeros(slots, dtype=torch.int64, device=device)
        self.penalties_T3 = torch.zeros(slots, 3, dtype=torch.float32, device=device)
        """Repetition, presence, frequency."""
        self.penalties_T3[:, 0] = 1.0

    def begin(self, slot: int, setting: SlotSampling) -> None:
        """The rules of a slot's new request."""
        for table in (self.bias_TV, self.counts_TV, self.prompt_TV, self.banned_TV):
            table[slot].zero_()
        if setting.logit_bias:
            ids, biases = zip(*setting.logit_bias, strict=True)
            self.bias_TV[slot].index_add_(0, self._ids(ids), to_device(biases, torch.float32, self._device))
        if setting.answer:
            ones = torch.ones(len(setting.answer), dtype=torch.int32, device=self._device)
            self.counts_TV[slot].index_add_(0, self._ids(setting.answer), ones)
        if setting.prompt:
            self.prompt_TV[slot].index_fill_(0, self._ids(setting.prompt), True)
        if setting.banned:
            self.banned_TV[slot].index_fill_(0, self._ids(setting.banned), True)
        self.banned_until_T[slot : slot + 1].fill_(setting.banned_until)
        penalties = (setting.repetition_penalty, setting.presence_penalty, setting.frequency_penalty)
        self.penalties_T3[slot].copy_(to_device(penalties, torch.float32, self._device), non_blocking=True)

    def set_counts(self, slot: int, answer: Mapping[int, int]) -> None:
        """How often the slot's answer holds each token, counted afresh."""
        self.counts_TV[slot].zero_()
        if answer:
            counts = to_device(list(answer.values()), torch.int32, self._device)
            self.counts_TV[slot].index_copy_(0, self._ids(tuple(answer)), counts)

    def _ids(self, ids: tuple[int, ...]) -> torch.Tensor:
        return to_device(ids, torch.int64, self._device)


class PageTable:
    """Pages of every slot, for the layers of one pool."""

    def __init__(self, limits: PlanLimits, page_size: int, padding_page: int, device: torch.device) -> None:
        self.page_size = page_size
        self.padding_page = padding_page
        self._device = device
        shape = (limits.max_batch + 1, limits.max_pages)
        self.pages_TP = torch.full(shape, padding_page, dtype=torch.int32, device=device)

    def update(self, entries: list[tuple[int, int, list[int]]]) -> None:
        """New entries: (slot, index of the first, pages)."""
        width = self.pages_TP.shape[1]
        places = [slot * width + first + n for slot, first, pages in entries for n in range(len(pages))]
        if places:
            pages = to_device([page for _, _, some in entries for page in some], torch.int32, self._device)
            self.pages_TP.view(-1).index_copy_(0, to_device(places, torch.int64, self._device), pages)

    def places(self, slots_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """KV slots of tokens, int64."""
        pages_R = self.pages_TP[slots_R, positions_R // self.page_size].long()
        return pages_R * self.page_size + positions_R % self.page_size


class SlotLists:
    """Which slots a step computes: one list for each padded number of requests, at an address that stays."""

    def __init__(self, padding_slot: int, device: torch.device) -> None:
        self._padding_slot = padding_slot
        self._device = device
        self._slots_B: dict[int, torch.Tensor] = {}
        self._sent: dict[int, list[int]] = {}

    def tensor(self, size: int) -> torch.Tensor:
        """The list of steps of `size` requests, int64."""
        if size not in self._slots_B:
            self._slots_B[size] = torch.full((size,), self._padding_slot, dtype=torch.int64, device=self._device)
        return self._slots_B[size]

    def send(self, size: int, slots: list[int]) -> None:
        """Let the next step compute `slots`, and padding behind them."""
        if self._sent.get(size) != slots:
            padded = slots + [self._padding_slot] * (size - len(slots))
            self.tensor(size).copy_(to_device(padded, torch.int64, self._device), non_blocking=True)
            self._sent[size] = slots

    def pad(self, size: int) -> None:
        """Let the next step compute padding alone."""
        self.tensor(size).fill_(self._padding_slot)
        self._sent.pop(size, None)


class DeviceState:
    """The tensors of all slots. Steps read and advance them; the host writes what plans bring."""

    def __init__(self, limits: PlanLimits, layout: KVLayout, vocabulary: int, device: torch.device) -> None:
        slots = limits.max_batch + 1
        self.device = device
        self.padding_slot = limits.max_batch
        self._vocabulary = vocabulary
        self.table = PageTable(limits, layout.page_size, layout.padding_page, device)
        self.tokens_T = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths_T = torch.zeros(slots, dtype=torch.int64, device=device)
        self.slots = SlotTables(
            self.tokens_T,
            self.lengths_T,
            torch.full((slots,), NO_END, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            self.table.pages_TP,
            layout.page_size,
            layout.padding_page,
        )
        self.window_table: PageTable | None = None
        """Where layers with a window have pages of their own."""
        if layout.window_pages:
            self.window_table = PageTable(limits, layout.page_size, layout.window_pages, device)
        self.temperature_T = torch.zeros(slots, dtype=torch.float32, device=device)
        self.top_k_T = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_p_T = torch.ones(slots, dtype=torch.float64, device=device)
        self.min_p_T = torch.zeros(slots, dtype=torch.float64, device=device)
        self.seed_T = torch.zeros(slots, dtype=torch.int64, device=device)
        self.rules: RuleState | None = None
        self._settings: dict[int, tuple[float, ...]] = {}
        """What the tensors of settings hold for each slot."""

    def begin(self, slot: int, setting: SlotSampling, has_rules: bool) -> None:
        """A new request takes the slot."""
        seed = setting.seed - (1 << 64) if setting.seed >> 63 else setting.seed
        ends = (setting.end or NO_END, setting.width)
        values = (setting.temperature, setting.top_k, setting.top_p, setting.min_p, seed, *ends)
        if setting.temperature < MIN_TEMPERATURE:
            values = (0.0, 0, 1.0, 0.0, 0, *ends)  # the others mean nothing to greedy requests
        if values != self._settings.get(slot):
            self._settings[slot] = values
            tensors = (self.temperature_T, self.top_k_T, self.top_p_T, self.min_p_T, self.seed_T)
            where = (*tensors, self.slots.ends_T, self.slots.widths_T)
            for tensor, value in zip(where, values, strict=True):
                tensor[slot : slot + 1].fill_(value)
        if has_rules and self.rules is None:
            self.rules = RuleState(len(self.tokens_T), self._vocabulary, self.device)
        if self.rules is not None:
            self.rules.begin(slot, setting)

    def set_lengths(self, slots: list[int], lengths: list[int]) -> None:
        """Tokens computed so far."""
        where = to_device(slots, torch.int64, self.device)
        self.lengths_T.index_copy_(0, where, to_device(lengths, torch.int64, self.device))

    def rewind(self, slots: list[int], tokens: list[int], lengths: list[int]) -> None:
        """Newest tokens and lengths as they were before steps that are to run again."""
        self.set_lengths(slots, lengths)
        where, what = (to_device(values, torch.int64, self.device) for values in (slots, tokens))
        self.tokens_T.index_copy_(0, where, what)

    def set_tokens(self, slots: list[int], tokens: list[int]) -> None:
        """Newest tokens, chosen by the host; rules take note of them."""
        where, what = (to_device(values, torch.int64, self.device) for values in (slots, tokens))
        self.tokens_T.index_copy_(0, where, what)
        self.count(where, what)

    def count(self, slots_M: torch.Tensor, tokens_M: torch.Tensor, real_M: torch.Tensor | None = None) -> None:
        """Let the rules take note of chosen tokens, of those that are `real_M` where that is given."""
        if self.rules is not None:
            counts_TV = self.rules.counts_TV
            places_M = slots_M * counts_TV.shape[1] + tokens_M
            ones_M = torch.ones_like(tokens_M, dtype=torch.int32) if real_M is None else real_M.int()
            counts_TV.view(-1).index_add_(0, places_M, ones_M)
