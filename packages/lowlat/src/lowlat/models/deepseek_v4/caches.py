"""Everything that a DeepSeek model keeps for its requests.

Two kinds: entries in pages (compressed KV and index keys, one for `ratio` tokens, found through the request's token
slots) and a fixed-size record a request (windows, compressor rings, token history), each a ring addressed by position:
a later token at the same position overwrites what a rejected draft left, so nothing is ever undone.

Legend of shape suffixes: S state rows, R rows, W ring places, D values, E entries.
"""

from __future__ import annotations

import torch

from lowlat.cache.groups import CacheGroup
from lowlat.layers.deepseek_entries import (
    EntryFormat,
    EntryPages,
    index_format,
    main_format,
    plain_format,
    window_format,
)
from lowlat.layers.deepseek_numerics import Numerics
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.step import StateSegment


class Ring:
    """The last `places` rows of each request, [S, W, D]; row of position p lies in place p mod W."""

    def __init__(self, states: int, places: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.places = places
        self.values_SWD = torch.zeros(states, places, width, dtype=dtype, device=device)

    def read(self, state: int, first: int, end: int) -> torch.Tensor:
        """Rows of positions first .. end - 1, of the last W written."""
        at = torch.arange(first, end, device=self.values_SWD.device) % self.places
        return self.values_SWD[state, at]

    def write(self, state: int, first: int, rows_RD: torch.Tensor) -> None:
        """Store rows of positions from `first` on; of more than W rows the last W."""
        skip = max(0, len(rows_RD) - self.places)
        at = torch.arange(first + skip, first + len(rows_RD), device=self.values_SWD.device) % self.places
        self.values_SWD[state, at] = rows_RD[skip:].to(self.values_SWD.dtype)


class WindowCache:
    """The sliding window of one layer: encoded entries in a ring for each request."""

    def __init__(self, entry: EntryFormat, states: int, places: int, device: torch.device) -> None:
        self.places = places
        self.entries = EntryPages(entry, states, places, device)

    def read(self, state: int, first: int, end: int) -> torch.Tensor:
        """Decoded entries of positions first .. end - 1, [E, D] float32 (or the plain type)."""
        return self.entries.read(self._slots(state, first, end))

    def write(self, state: int, first: int, values_RD: torch.Tensor) -> None:
        """Store entries of positions from `first` on; of more than the ring holds, the last ones."""
        skip = max(0, len(values_RD) - self.places)
        self.entries.write(self._slots(state, first + skip, first + len(values_RD)), values_RD[skip:])

    def _slots(self, state: int, first: int, end: int) -> torch.Tensor:
        at = torch.arange(first, end, device=self.entries.bytes_PB.device)
        return state * self.places + at % self.places


class DeepseekCaches:
    """All caches of one rank: `pages` pages of `page_size` tokens, `states` requests at a time.

    Keys and values are the same on all ranks, so under tensor parallelism every rank holds all of it.
    """

    def __init__(
        self,
        config: DeepseekConfig,
        numerics: Numerics,
        *,
        pages: int,
        page_size: int,
        states: int,
        device: torch.device | None = None,
        width: int | None = None,
        draft: bool = True,
        reach: int = 0,
    ) -> None:
        """`width`: most rows of a request in a decode step, of which all but one may be rejected; None: one, and the
        draft's block. `draft` false: no windows for draft layers. `reach`: a copied record also serves prefixes that
        end so many tokens earlier.

        Raises `ValueError` when a page does not hold whole entries.
        """
        self.config = config
        self.numerics = numerics
        device = device or torch.device("cpu")
        draft = draft and config.has_draft
        drafts = width - 1 if width is not None else config.dspark_block_size if draft else 0
        # Both are rows that were written and count for nothing: rejected, or beyond the prefix that is resumed.
        beyond = max(drafts, reach)
        layers = config.num_hidden_layers
        draft_layers = config.num_nextn_predict_layers if draft else 0
        window = self._format("window", config.head_dim)
        places = config.sliding_window + beyond
        self.windows = [WindowCache(window, states, places, device) for _ in range(layers + draft_layers)]
        self.main: dict[int, EntryPages] = {}
        self.keys: dict[int, EntryPages] = {}
        self.rings: dict[str, Ring] = {}
        for layer in range(layers):
            if config.is_kv_source(layer):
                self._add_source(layer, pages, page_size, states, beyond, device)
        self.history = Ring(states, _power_of_two(config.engram_max_ngram_size + beyond), 1, torch.int64, device)
        self.draft_floor_S = torch.zeros(states, dtype=torch.int64, device=device)
        """First position of which the draft has features."""

    def _add_source(
        self, layer: int, pages: int, page_size: int, states: int, beyond: int, device: torch.device
    ) -> None:
        config = self.config
        ratio = config.compress_ratios[layer]
        if page_size % ratio:
            raise ValueError(f"pages of {page_size} tokens do not hold whole entries of {ratio} tokens")
        entries = page_size // ratio
        self.main[layer] = EntryPages(self._format("main", config.head_dim), pages, entries, device)
        rings = {"compressor": config.head_dim}
        if config.has_index_keys(layer):
            self.keys[layer] = EntryPages(self._format("index", config.index_head_dim), pages, entries, device)
            if not config.v41:
                rings["indexer.compressor"] = config.index_head_dim
        if ratio == 1:
            return
        overlap = ratio == 4 and not config.v41
        past = ratio * (1 + overlap) - 1
        dtype = torch.float32 if self.numerics.quantised else self.numerics.compute
        for name, width in rings.items():
            size = 2 * width * (1 + overlap)
            self.rings[f"{layer}.{name}"] = Ring(states, _power_of_two(past + 1 + beyond), size, dtype, device)

    def _format(self, kind: str, values: int) -> EntryFormat:
        # V4's own entry formats (584 bytes; index keys after a Hadamard rotation) are not made here.
        if not self.numerics.quantised or not self.config.v41:
            return plain_format(values, self.numerics.compute)
        return {"window": window_format, "main": main_format, "index": index_format}[kind](values)

    def entry_slots(self, segment: StateSegment, layer: int, entries: torch.Tensor) -> torch.Tensor:
        """Slots in `main[layer]` and `keys[layer]` of a request's entries (ids, any shape)."""
        ratio = self.config.compress_ratios[layer]
        return torch.div(segment.slots_L[entries * ratio], ratio, rounding_mode="floor")

    # --- the record of one request ---

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor of the per-request record; the first dimension is the state row."""
        tensors = [window.entries.bytes_PB for window in self.windows]
        tensors += [ring.values_SWD for ring in self.rings.values()]
        return [*tensors, self.history.values_SWD, self.draft_floor_S]

    def copy_state(self, source: int, target: int) -> None:
        """Make state row `target` equal to `source`: saves or restores a snapshot at the end of a prefix."""
        for tensor in self.state_tensors():
            tensor[target] = tensor[source]

    def begin_replay(self, state: int, start: int, tokens_before: list[int]) -> None:
        """Prepare a state row for replay from position `start`: the token history before it, nothing else.

        Needs the last min(start, n-gram size - 1) tokens before `start`, the newest last.
        """
        needed = min(start, self.config.engram_max_ngram_size - 1) if self.config.engram_layer_ids else 0
        if len(tokens_before) < needed:
            raise ValueError(f"{needed} tokens before position {start} are needed, not {len(tokens_before)}")
        if needed:
            rows = torch.tensor(tokens_before[-needed:]).unsqueeze(1)
            self.history.write(state, start - needed, rows)

    def groups(self) -> list[CacheGroup]:
        """What these caches are, for whoever allocates them."""
        result = []
        for layer, pages in self.main.items():
            ratio = self.config.compress_ratios[layer]
            size = pages.format.bytes + (self.keys[layer].format.bytes if layer in self.keys else 0)
            result.append(
                CacheGroup(name=f"compressed.{layer}", bytes_per_entry=size, tokens_per_entry=ratio, replicated=True)
            )
        record = sum(tensor[0].numel() * tensor.element_size() for tensor in self.state_tensors())
        result.append(CacheGroup(name="state", bytes_per_entry=record, lifetime="state", replicated=True))
        return result


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
