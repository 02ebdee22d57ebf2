"""What a model sees of a step whose state lives on the device: nothing in it has to be read by the host.

Legend of shape suffixes: R rows, B segments of a batch, T rows of the page table, P pages of a row, N query heads,
D head dimension, H hidden, I intermediate, Y heads of a packed projection (queries, keys, values), S KV slots,
K key-value heads, O output features, V rows of a table.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from lowlat.layers.attention import AttentionRule
from lowlat.layers.moe import Experts
from lowlat.layers.verify import SlotTables, VerifyRows
from lowlat.platform.base import PackedLinear


class ItemSegments(msgspec.Struct):
    """What rows see where items stand one behind the other in a request: the tokens before all items, and those of
    their own item up to themselves. Tensors are int32.

    A row at place `p` of its request sees, up to `p`, the places before `prefix_B` and those from `begins_R` on. In
    segments without items both are the segment's length, which is the same as seeing everything.
    """

    prefix_B: torch.Tensor
    begins_R: torch.Tensor
    """By row of the step, not of the segment."""


class RowSegments(msgspec.Struct):
    """Runs of neighbouring rows, each the last rows of one request. Tensors are int32."""

    slots_B: torch.Tensor
    """Rows of the page table."""
    first_B: torch.Tensor
    """First row of each segment among the rows of the step."""
    rows_B: torch.Tensor
    """Rows of each segment."""
    lengths_B: torch.Tensor
    """Tokens of the request after the step; 0: a segment of padding, whose rows see nothing and give zeros."""
    most_rows: int
    """Rows that no segment exceeds."""
    longest: int
    """Tokens that no segment exceeds."""
    items: ItemSegments | None = None
    """Where some segments are rows of items; None: every row sees all tokens of its request up to itself."""
    tight: bool = False
    """Kernels are made for exactly `most_rows`: for steps that are prepared before the first request."""


class DeviceStep(msgspec.Struct):
    """One step. Rows that belong to no segment's request are padding: their slots are those of the padding page."""

    tokens_R: torch.Tensor
    """int64."""
    positions_R: torch.Tensor
    """int64."""
    write_slots_R: torch.Tensor
    """int64: KV slots of the rows' own tokens."""
    segments: list[RowSegments]
    """Together they cover every row once."""
    table_TP: torch.Tensor
    """int32: pages of every batch slot. Token `t` of segment `b` lies in KV slot
    `table_TP[slots_B[b], t // page_size] * page_size + t % page_size`; entries beyond a request's own are not read."""
    page_size: int
    sample_rows: torch.Tensor | None
    """int64: rows whose logits are wanted, in this order; None: all rows in order."""
    block_base: int = -1
    """From 0 on: segments are blocks of a draft. Rows see all rows of their segment, and those keys lie beyond the
    pages: row `r`'s in KV slot `block_base + r`. `lengths_B` counts them too."""
    windowed: DeviceStep | None = None
    """The same rows for layers with a window, whose keys lie in pages of their own; None: there are none such."""


class DecodeRows(msgspec.Struct):
    """One row for each of the slots that decode, and for padding."""

    tokens_B: torch.Tensor
    """int64: the slots' newest tokens, the rows' input."""
    before_B: torch.Tensor
    """int64: lengths before the step, which are the rows' positions."""
    after_B: torch.Tensor
    """int64: lengths after it; 0 for padding."""
    places: list[torch.Tensor]
    """int64: KV slots of the rows' own tokens, for each page table."""
    slots32_B: torch.Tensor
    """The fields of `RowSegments`, int32."""
    first32_B: torch.Tensor
    rows32_B: torch.Tensor
    lengths32_B: torch.Tensor


class DeviceOps(Protocol):
    """The operations of a decoder layer, and what a decode step begins and ends with: fused on a GPU, plain PyTorch
    elsewhere.

    None but `experts` reads device data on the host, so all may be captured in a graph.
    """

    def norm(self, x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm, [R, H]."""

    def add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `x_RH` to `residual_RH` in place, and RMSNorm of the sum, [R, H]."""

    def look_up(self, places_R: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] of a table at int64 places."""

    def add(self, x_RH: torch.Tensor, y_RH: torch.Tensor, out_RH: torch.Tensor) -> None:
        """Write the sum to `out_RH`, whose rows may lie apart."""

    def product(
        self,
        x_RI: torch.Tensor,
        linear: PackedLinear,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`linear` of the rows, [R, O]; activation and type as in `add_norm_product`."""

    def add_norm_product(
        self,
        x_RH: torch.Tensor | None,
        residual_RH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        linear: PackedLinear,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x_RH` (None: nothing) to `residual_RH`, norm the sum, multiply.

        With an `activation`, as `GATED` names it, the result is activation(first half) times second half of the
        columns.

        Returns:
            the result [R, O], in `out_dtype` where given, and the sum; `residual_RH` may have been overwritten with it.
        """

    def rope_write(
        self,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Norm (where given: query weight [D], key weight [D], eps) and rotate queries and keys, write keys and values
        to the rows' slots; returns the queries, [R, N, D]. `tables`: cosines and signed sines, [positions, D]."""

    def write_layers(
        self,
        kv_RLYD: torch.Tensor,
        keys_LSKD: torch.Tensor,
        values_LSKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, float],
    ) -> None:
        """Normed and rotated keys, and values, of every row for each of `L` layers, written to their caches. `norms`:
        weights by layer, and what is added to the mean square."""

    def attend(
        self,
        q_RND: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Causal attention of every row over its own request's tokens up to itself, [R, N * D]; padding gives zeros.
        Blocks of a draft (`block_base`) see all their rows and, with a window, that many tokens before the block."""

    def rope_attend(
        self,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """`rope_write` and `attend` of what it returns; a draft's block need not be written."""

    def take_slots(
        self,
        slots_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        pages_TP: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a decode step reads of its slots (int64): their tokens and places, the KV slots of those (all int64),
        lengths after the step (int32), and the slots themselves as int32."""

    def put_tokens(
        self,
        slots_B: torch.Tensor,
        chosen_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        padding: int,
    ) -> None:
        """Write chosen tokens (int64; 0 for -1, so that the next step may look it up) to their slots, whose lengths
        grow by one, but for the slot of padding."""

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on the host, whole once all is done that is queued now. Whoever asks keeps it until then."""

    def experts(
        self, x_RH: torch.Tensor, experts_RA: torch.Tensor, weights_RA: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """Weighted sums over each row's experts, [R, H]: `experts` of the rows, and what their router says (A experts a
        row)."""

    def finds_experts(self, experts: Experts, rows: int) -> bool:
        """Whether `experts` of up to so many rows reads nothing on the host."""

    def begin_decodes(
        self,
        slots_B: torch.Tensor,
        padding_slot: int,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        tables: list[tuple[torch.Tensor, int]],
    ) -> DecodeRows:
        """The rows of a decode step. Advances `lengths_T`, but not the padding slot's; `tables`: [T, P] pages and the
        tokens of a page, of one pool or two."""

    def greedy(self, logits_MV: torch.Tensor, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """The most likely tokens, int64, the first of equals; -1 where a row holds NaN, or its largest logit is no
        finite number. `tokens_T` gets them at the slots, 0 for -1."""

    def draw(
        self,
        logits_MV: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        settings: tuple[torch.Tensor, torch.Tensor] | None,
        ids_V: torch.Tensor | None = None,
        sharpness: float = 1.0,
    ) -> torch.Tensor:
        """As `drawing.draw`."""

    def keep_likely(
        self,
        scores_MV: torch.Tensor,
        temperature_M: torch.Tensor,
        top_k_M: torch.Tensor,
        top_p_M: torch.Tensor,
        min_p_M: torch.Tensor,
    ) -> torch.Tensor:
        """As `filtering.keep_likely`."""

    def walk(
        self,
        logits_GBV: torch.Tensor,
        first_B: torch.Tensor,
        embed_XE: torch.Tensor,
        head_VE: torch.Tensor,
        slots_B: torch.Tensor,
        positions_GB: torch.Tensor,
        settings: tuple[torch.Tensor, torch.Tensor] | None,
        ids_V: torch.Tensor | None,
        sharpness: float,
    ) -> torch.Tensor:
        """As `drawing.walk`."""

    def find_again(
        self,
        slots_B: torch.Tensor,
        tables: SlotTables,
        count: int,
        shortest: int = 1,
        others_BG: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `history.find_again`."""

    def begin_rows(
        self, slots_B: torch.Tensor, tables: SlotTables, guesses_BG: torch.Tensor, counts_B: torch.Tensor | None
    ) -> VerifyRows:
        """Rows that check guesses, see `verify`."""

    def accept(
        self,
        chosen_R: torch.Tensor,
        rows: VerifyRows,
        slots_B: torch.Tensor,
        tables: SlotTables,
        guesses_BG: torch.Tensor,
        forced_B: torch.Tensor | None,
    ) -> torch.Tensor:
        """Advance the slots by the tokens that count, see `verify`."""
