"""The operations of a decoder layer as Triton kernels. Importing this module imports triton.

Legend of shape suffixes: see `device_step`; O output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from lowlat.layers.activation import GATED, ClampedSwiglu
from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DecodeRows, DeviceStep, RowSegments
from lowlat.layers.moe import Experts
from lowlat.layers.triton import experts as expert_kernels
from lowlat.layers.triton import row_attention
from lowlat.layers.triton.activation import KINDS, gated
from lowlat.layers.triton.attention import attend
from lowlat.layers.triton.drawing import draw, walk
from lowlat.layers.triton.experts import ExpertTable
from lowlat.layers.triton.filtering import keep_likely
from lowlat.layers.triton.history import find_again
from lowlat.layers.triton.host import fetch
from lowlat.layers.triton.norm import add_rms_norm, rms_norm
from lowlat.layers.triton.product import most_rows, product
from lowlat.layers.triton.rope_write import rope_write, write_layers
from lowlat.layers.triton.row_product import fits, fits_head, row_product
from lowlat.layers.triton.rows import add_rows, look_up
from lowlat.layers.triton.slots import put_tokens, take_slots
from lowlat.layers.triton.step import begin_decodes, greedy
from lowlat.layers.triton.verify import accept, begin_rows
from lowlat.layers.verify import SlotTables, VerifyRows
from lowlat.platform.base import PackedLinear
from lowlat.platform.cuda import CudaLinear

EVERY = 1 << 30
"""More requests than any step has."""


class _LayersExperts(msgspec.Struct, frozen=True):
    """What the kernels need of a layer's experts."""

    gate_up: ExpertTable
    down: ExpertTable
    activation: tuple[int, float, float]

    @classmethod
    def of(cls, experts: Experts) -> _LayersExperts | None:
        """None: the kernels do not know such experts."""
        activation = _activation(experts)
        tables = [_table(products) for products in (experts.gate_up, experts.down)]
        if activation is None or tables[0] is None or tables[1] is None:
            return None
        return cls(tables[0], tables[1], activation)


def _activation(experts: Experts) -> tuple[int, float, float] | None:
    if isinstance(experts.activation, ClampedSwiglu):
        return 2, experts.activation.alpha, experts.activation.limit
    names = [name for name, function in GATED.items() if function is experts.activation and name in KINDS]
    return (KINDS[names[0]], 0.0, 0.0) if names else None


def _table(products: Sequence[PackedLinear]) -> ExpertTable | None:
    plain = [product for product in products if isinstance(product, CudaLinear)]
    if len(plain) < len(products) or not expert_kernels.fits(plain[0].weight_OI):
        return None
    return ExpertTable.of([product.weight_OI for product in plain], [product.bias_O for product in plain])


class TritonOps:
    """`DeviceOps` on a device with `processors` multiprocessors."""

    def __init__(self, processors: int, *, early_start: bool = False) -> None:
        """`early_start`: kernels may start while the one before them runs (`triton.early`)."""
        self.row_products = False
        """Whether products of several rows with small weights have a kernel of ours (`engine/row_kernels.py`)."""
        self.row_heads = False
        """The same of products with a head."""
        self.row_attention = 0
        """Requests of a step up to which attention of a few new rows of each has kernels of its own
        (`engine/row_kernels.py`)."""
        self.one_row_attention = 0
        """The same of one new row of each: decode steps without guesses."""
        self._programs = 2 * processors
        self._early = early_start
        self._experts: dict[int, _LayersExperts | None] = {}

    def norm(self, x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        return rms_norm(x_RH, weight_H, eps, early_start=self._early)

    def add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add to the residual stream in place, and RMSNorm."""
        return add_rms_norm(x_RH, residual_RH, weight_H, eps, early_start=self._early)

    def look_up(self, places_R: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
        """Rows of a table."""
        return look_up(places_R, table_VH, early_start=self._early)

    def add(self, x_RH: torch.Tensor, y_RH: torch.Tensor, out_RH: torch.Tensor) -> None:
        """The sum."""
        add_rows(x_RH, y_RH, out_RH, early_start=self._early)

    def _by_rows(self, rows: int, weight_OI: torch.Tensor) -> bool:
        """Whether a kernel multiplies these several rows at once."""
        return (self.row_products and fits(rows, weight_OI)) or (self.row_heads and fits_head(rows, weight_OI))

    def product(
        self,
        x_RI: torch.Tensor,
        linear: PackedLinear,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """One product: of few rows by a kernel of ours, otherwise by PyTorch's."""
        result = None
        if isinstance(linear, CudaLinear) and self._by_rows(len(x_RI), linear.weight_OI):
            return row_product(
                x_RI, linear.weight_OI, linear.bias_O, activation=activation, out_dtype=out_dtype,
                early_start=self._early,
            )[0]  # fmt: skip
        if isinstance(linear, CudaLinear) and len(x_RI) <= most_rows(*linear.weight_OI.shape, norm=False):
            result = product(
                x_RI, linear.weight_OI, linear.bias_O, activation=activation, out_dtype=out_dtype,
                early_start=self._early,
            )  # fmt: skip
        if result is not None:
            return result[0]
        out_RO = linear(x_RI)
        out_RO = out_RO if activation is None else gated(out_RO, activation, early_start=self._early)
        return out_RO if out_dtype is None else out_RO.to(out_dtype)

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
        """In one kernel for few rows."""
        first, stream = (residual_RH, None) if x_RH is None else (x_RH, residual_RH)
        rows = len(residual_RH)
        if isinstance(linear, CudaLinear) and self._by_rows(rows, linear.weight_OI):
            return row_product(
                first, linear.weight_OI, linear.bias_O, stream_RI=stream, norm_I=weight_H, eps=eps,
                activation=activation, out_dtype=out_dtype, early_start=self._early,
            )  # fmt: skip
        if isinstance(linear, CudaLinear) and rows <= most_rows(*linear.weight_OI.shape, norm=True):
            result = product(
                first, linear.weight_OI, linear.bias_O, stream_RI=stream, norm_I=weight_H, eps=eps,
                activation=activation, out_dtype=out_dtype, early_start=self._early,
            )  # fmt: skip
            if result is not None:
                return result
        normed_RH = (
            self.norm(residual_RH, weight_H, eps) if x_RH is None else self.add_norm(x_RH, residual_RH, weight_H, eps)
        )
        return self.product(normed_RH, linear, activation, out_dtype), residual_RH

    def rope_write(
        self,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Norm, rotation, and the write of keys and values."""
        return rope_write(
            qkv_RYD, keys_SKD, values_SKD, step.positions_R, step.write_slots_R, tables, norms, early_start=self._early
        )

    def write_layers(
        self,
        kv_RLYD: torch.Tensor,
        keys_LSKD: torch.Tensor,
        values_LSKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, float],
    ) -> None:
        """Norm, rotation, and the write, of all layers."""
        where = (keys_LSKD, values_LSKD, step.positions_R, step.write_slots_R)
        write_layers(kv_RLYD, *where, tables, norms, early_start=self._early)

    def attend(
        self,
        q_RND: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Paged attention of the segments' rows; other rows of the result are not written."""
        out_RND = torch.empty_like(q_RND)
        for batch in step.segments:
            attend(
                q_RND, keys_SKD, values_SKD, step.table_TP, step.page_size, batch, rule, out_RND,
                programs=self._programs, early_start=self._early, block_base=step.block_base,
            )  # fmt: skip
        return out_RND.flatten(1)

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
        """In two kernels for a few new rows of each request."""
        rows, packed, dim = qkv_RYD.shape
        kv_heads = keys_SKD.shape[1]
        heads = packed - 2 * kv_heads
        few: list[RowSegments] = []
        others: list[RowSegments] = []
        for batch in step.segments:
            (few if self._by_new_rows(batch, heads, kv_heads, dim) else others).append(batch)
        if others:
            q_RND = self.rope_write(qkv_RYD, keys_SKD, values_SKD, step, tables, norms)
            seen = msgspec.structs.replace(step, segments=others)
            out_RX = self.attend(q_RND, keys_SKD, values_SKD, seen, rule)
        else:
            out_RX = qkv_RYD.new_empty(rows, heads * dim)
        for batch in few:
            self.row_attend(qkv_RYD, keys_SKD, values_SKD, step, batch, tables, norms, rule, out_RX)
        return out_RX

    def row_attend(
        self,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        batch: RowSegments,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        rule: AttentionRule,
        out_RX: torch.Tensor,
    ) -> None:
        """`rope_attend` of a few new rows of each request; writes them to `out_RX`, [R, N * D]."""
        row_attention.row_attend(
            qkv_RYD, keys_SKD, values_SKD, step, batch, tables, norms, rule, out_RX,
            programs=self._programs, early_start=self._early,
        )  # fmt: skip

    def _by_new_rows(self, batch: RowSegments, heads: int, kv_heads: int, dim: int) -> bool:
        """Whether these rows have the attention of a few new ones."""
        most = self.one_row_attention if batch.most_rows == 1 else self.row_attention
        return len(batch.slots_B) <= most and row_attention.fits(batch, heads, kv_heads, dim)

    def take_slots(
        self,
        slots_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        pages_TP: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up the slots' states."""
        return take_slots(slots_B, tokens_T, lengths_T, pages_TP, page_size, early_start=self._early)

    def put_tokens(
        self,
        slots_B: torch.Tensor,
        chosen_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        padding: int,
    ) -> None:
        """Write them."""
        put_tokens(slots_B, chosen_B, tokens_T, lengths_T, padding, early_start=self._early)

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """Tokens by a store to pinned memory, everything else by the copy engine."""
        return fetch(source)

    def experts(
        self, x_RH: torch.Tensor, experts_RA: torch.Tensor, weights_RA: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """Of few rows by kernels that find the experts themselves."""
        known = self._known(experts)
        if known is None or len(x_RH) > expert_kernels.MOST_ROWS:
            return experts(x_RH, experts_RA, weights_RA)
        return expert_kernels.experts(
            x_RH, experts_RA, weights_RA, known.gate_up, known.down, known.activation, early_start=self._early
        )

    def finds_experts(self, experts: Experts, rows: int) -> bool:
        """Where the kernels know them."""
        return rows <= expert_kernels.MOST_ROWS and self._known(experts) is not None

    def _known(self, experts: Experts) -> _LayersExperts | None:
        if id(experts) not in self._experts:
            self._experts[id(experts)] = _LayersExperts.of(experts)
        return self._experts[id(experts)]

    def begin_decodes(
        self,
        slots_B: torch.Tensor,
        padding_slot: int,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        tables: list[tuple[torch.Tensor, int]],
    ) -> DecodeRows:
        """Rows of the slots."""
        return begin_decodes(slots_B, padding_slot, tokens_T, lengths_T, tables)

    def greedy(self, logits_MV: torch.Tensor, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """The largest logits."""
        return greedy(logits_MV, slots_M, tokens_T, early_start=self._early)

    def draw(
        self,
        logits_MV: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        settings: tuple[torch.Tensor, torch.Tensor] | None,
        ids_V: torch.Tensor | None = None,
        sharpness: float = 1.0,
    ) -> torch.Tensor:
        """Likeliest or drawn tokens."""
        return draw(logits_MV, slots_M, positions_M, settings, ids_V, sharpness, early_start=self._early)

    def keep_likely(
        self,
        scores_MV: torch.Tensor,
        temperature_M: torch.Tensor,
        top_k_M: torch.Tensor,
        top_p_M: torch.Tensor,
        min_p_M: torch.Tensor,
    ) -> torch.Tensor:
        """What top-k, top-p and min-p let pass."""
        return keep_likely(scores_MV, temperature_M, top_k_M, top_p_M, min_p_M)

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
        """Columns one after the other."""
        return walk(
            logits_GBV,
            first_B,
            embed_XE,
            head_VE,
            slots_B,
            positions_GB,
            settings,
            ids_V,
            sharpness,
            early_start=self._early,
        )

    def find_again(
        self,
        slots_B: torch.Tensor,
        tables: SlotTables,
        count: int,
        shortest: int = 1,
        others_BG: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed before."""
        return find_again(slots_B, tables, count, shortest, others_BG, early_start=self._early)

    def begin_rows(
        self, slots_B: torch.Tensor, tables: SlotTables, guesses_BG: torch.Tensor, counts_B: torch.Tensor | None
    ) -> VerifyRows:
        """Rows that check guesses."""
        return begin_rows(slots_B, tables, guesses_BG, counts_B, early_start=self._early)

    def accept(
        self,
        chosen_R: torch.Tensor,
        rows: VerifyRows,
        slots_B: torch.Tensor,
        tables: SlotTables,
        guesses_BG: torch.Tensor,
        forced_B: torch.Tensor | None,
    ) -> torch.Tensor:
        """Advance the slots by the tokens that count."""
        return accept(chosen_R, rows, slots_B, tables, guesses_BG, forced_B, early_start=self._early)
