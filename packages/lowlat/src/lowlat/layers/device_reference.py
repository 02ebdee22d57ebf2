"""The operations of a decoder layer in plain PyTorch, without a read of device data.

Kernels are compared with these, and they run where there are no kernels.

Legend of shape suffixes: see `device_step`.
"""

from __future__ import annotations

import torch

from lowlat.layers import drawing, filtering, history, verify
from lowlat.layers.activation import GATED
from lowlat.layers.attention import AttentionRule, masked_attention
from lowlat.layers.device_step import DecodeRows, DeviceStep, RowSegments
from lowlat.layers.moe import Experts
from lowlat.layers.norm import rms_norm
from lowlat.layers.rope import rotate
from lowlat.layers.verify import SlotTables, VerifyRows
from lowlat.platform.base import PackedLinear


def host_room(source: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a copy of `source`: pinned where that is on a GPU."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")


def copy_to_host(source: torch.Tensor) -> torch.Tensor:
    """As `DeviceOps.fetch`, by the copy engine."""
    return host_room(source).copy_(source, non_blocking=True)


class ReferenceOps:
    """`DeviceOps` in plain PyTorch."""

    def norm(self, x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        return rms_norm(x_RH, weight_H, eps)

    def add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add to the residual stream in place, and RMSNorm."""
        residual_RH += x_RH
        return rms_norm(residual_RH, weight_H, eps)

    def look_up(self, places_R: torch.Tensor, table_VH: torch.Tensor) -> torch.Tensor:
        """Rows of a table."""
        return torch.nn.functional.embedding(places_R, table_VH)

    def add(self, x_RH: torch.Tensor, y_RH: torch.Tensor, out_RH: torch.Tensor) -> None:
        """The sum."""
        torch.add(x_RH, y_RH, out=out_RH)

    def gate(self, gate_up_RI: torch.Tensor, activation: str) -> torch.Tensor:
        """Gated activation."""
        gate_RI, up_RI = gate_up_RI.chunk(2, dim=-1)
        return GATED[activation](gate_RI, up_RI)

    def product(
        self,
        x_RI: torch.Tensor,
        linear: PackedLinear,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """One product."""
        out_RO = linear(x_RI)
        out_RO = out_RO if activation is None else self.gate(out_RO, activation)
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
        """One after another."""
        if x_RH is not None:
            residual_RH += x_RH
        return self.product(rms_norm(residual_RH, weight_H, eps), linear, activation, out_dtype), residual_RH

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
        kv_heads = keys_SKD.shape[1]
        rotated = qkv_RYD.shape[1] - kv_heads
        queries = rotated - kv_heads
        q_RND, k_RKD = qkv_RYD[:, :queries], qkv_RYD[:, queries:rotated]
        if norms is not None:
            query_D, key_D, eps = norms
            q_RND, k_RKD = rms_norm(q_RND, query_D, eps), rms_norm(k_RKD, key_D, eps)
        cos_R1D, sin_R1D = (table.index_select(0, step.positions_R).unsqueeze(1).to(qkv_RYD.dtype) for table in tables)
        keys_SKD.index_copy_(0, step.write_slots_R, rotate(k_RKD, cos_R1D, sin_R1D))
        values_SKD.index_copy_(0, step.write_slots_R, qkv_RYD[:, rotated:])
        return rotate(q_RND, cos_R1D, sin_R1D)

    def write_layers(
        self,
        kv_RLYD: torch.Tensor,
        keys_LSKD: torch.Tensor,
        values_LSKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, float],
    ) -> None:
        """Layer after layer."""
        norms_LD, eps = norms
        for layer, norm_D in enumerate(norms_LD):
            parts = kv_RLYD[:, layer], keys_LSKD[layer], values_LSKD[layer]
            self.rope_write(*parts, step, tables, (norm_D, norm_D, eps))

    def attend(
        self,
        q_RND: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attention over gathered keys and values, as long as the longest request of a batch may be."""
        out_RND = torch.zeros_like(q_RND)
        for batch in step.segments:
            _attend(q_RND, keys_SKD, values_SKD, step, batch, rule, out_RND)
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
        """One after the other."""
        q_RND = self.rope_write(qkv_RYD, keys_SKD, values_SKD, step, tables, norms)
        return self.attend(q_RND, keys_SKD, values_SKD, step, rule)

    def take_slots(
        self,
        slots_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        pages_TP: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Look up the slots' states."""
        place_B = lengths_T[slots_B]
        page_B = pages_TP[slots_B, place_B // page_size].long()
        write_B = page_B * page_size + place_B % page_size
        return tokens_T[slots_B], place_B, write_B, (place_B + 1).int(), slots_B.int()

    def put_tokens(
        self,
        slots_B: torch.Tensor,
        chosen_B: torch.Tensor,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        padding: int,
    ) -> None:
        """Write them."""
        tokens_T.index_copy_(0, slots_B, chosen_B.clamp(min=0))
        lengths_T.index_copy_(0, slots_B, lengths_T[slots_B] + (slots_B != padding))

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """By the copy engine."""
        return copy_to_host(source)

    def experts(
        self, x_RH: torch.Tensor, experts_RA: torch.Tensor, weights_RA: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """Expert by expert; the host asks which were chosen."""
        return experts(x_RH, experts_RA, weights_RA)

    def finds_experts(self, experts: Experts, rows: int) -> bool:
        """Never."""
        return False

    def begin_decodes(
        self,
        slots_B: torch.Tensor,
        padding_slot: int,
        tokens_T: torch.Tensor,
        lengths_T: torch.Tensor,
        tables: list[tuple[torch.Tensor, int]],
    ) -> DecodeRows:
        """Rows of the slots."""
        before_B = lengths_T[slots_B]
        after_B = before_B + (slots_B != padding_slot)
        # Padding rows write the same zero length, whatever the others do.
        lengths_T.index_copy_(0, slots_B, after_B)
        places = [table_TP[slots_B, before_B // size] * size + before_B % size for table_TP, size in tables]
        first_B = torch.arange(len(slots_B), dtype=torch.int32, device=slots_B.device)
        segments = (slots_B.int(), first_B, torch.ones_like(first_B), after_B.int())
        return DecodeRows(tokens_T[slots_B], before_B, after_B, [place_B.long() for place_B in places], *segments)

    def greedy(self, logits_MV: torch.Tensor, slots_M: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        """The largest logits."""
        best_M, tokens_M = logits_MV.max(dim=-1)
        tokens_M = torch.where(best_M.isfinite(), tokens_M, -1)
        tokens_T.index_copy_(0, slots_M, tokens_M.clamp(min=0))
        return tokens_M

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
        return drawing.draw(logits_MV, slots_M, positions_M, settings, ids_V, sharpness)

    def keep_likely(
        self,
        scores_MV: torch.Tensor,
        temperature_M: torch.Tensor,
        top_k_M: torch.Tensor,
        top_p_M: torch.Tensor,
        min_p_M: torch.Tensor,
    ) -> torch.Tensor:
        """What top-k, top-p and min-p let pass."""
        return filtering.keep_likely(scores_MV, temperature_M, top_k_M, top_p_M, min_p_M)

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
        return drawing.walk(logits_GBV, first_B, embed_XE, head_VE, slots_B, positions_GB, settings, ids_V, sharpness)

    def find_again(
        self,
        slots_B: torch.Tensor,
        tables: SlotTables,
        count: int,
        shortest: int = 1,
        others_BG: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed before."""
        return history.find_again(slots_B, tables, count, shortest, others_BG)

    def begin_rows(
        self, slots_B: torch.Tensor, tables: SlotTables, guesses_BG: torch.Tensor, counts_B: torch.Tensor | None
    ) -> VerifyRows:
        """Rows that check guesses."""
        return verify.begin_rows(slots_B, tables, guesses_BG, counts_B)

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
        return verify.accept(chosen_R, rows, slots_B, tables, guesses_BG, forced_B)


def _attend(
    q_RND: torch.Tensor,
    keys_SKD: torch.Tensor,
    values_SKD: torch.Tensor,
    step: DeviceStep,
    batch: RowSegments,
    rule: AttentionRule,
    out_RND: torch.Tensor,
) -> None:
    """Segments of one size at most: [B, T] rows and [B, L] tokens, masked where a segment has fewer."""
    rows, heads, dim = q_RND.shape
    kv_heads = keys_SKD.shape[1]
    device = q_RND.device
    row_BT = batch.first_B[:, None] + torch.arange(batch.most_rows, device=device)
    real_BT = torch.arange(batch.most_rows, device=device) < batch.rows_B[:, None]
    row_BT = torch.where(real_BT, row_BT, rows)
    before_B1 = (batch.lengths_B - batch.rows_B)[:, None]
    position_BT = before_B1 + torch.arange(batch.most_rows, device=device)
    token_L = torch.arange(batch.longest, device=device)
    pages_BL = step.table_TP[batch.slots_B.long()][:, (token_L // step.page_size).clamp(max=step.table_TP.shape[1] - 1)]
    slots_BL = pages_BL.long() * step.page_size + token_L % step.page_size
    seen_BTL = real_BT[:, :, None] & (token_L <= position_BT[:, :, None])
    if step.block_base >= 0:
        block_BL = step.block_base + batch.first_B[:, None] + token_L - before_B1
        slots_BL = torch.where(token_L < before_B1, slots_BL, block_BL)
        seen_BTL = real_BT[:, :, None] & (token_L < batch.lengths_B[:, None])[:, None]
        if rule.window:
            seen_BTL &= (token_L >= before_B1 - rule.window)[:, None]
    elif batch.items is not None:
        begin_BT1 = torch.cat([batch.items.begins_R, batch.items.begins_R.new_zeros(1)])[row_BT.long()][:, :, None]
        prefix_B11 = batch.items.prefix_B[:, None, None]
        shared_BTL, own_BTL = token_L < prefix_B11, token_L >= begin_BT1
        if rule.window:
            # To a row, its item begins where the prefix ends.
            shared_BTL = shared_BTL & (token_L > prefix_B11 + position_BT[:, :, None] - begin_BT1 - rule.window)
            own_BTL &= token_L > position_BT[:, :, None] - rule.window
        seen_BTL &= shared_BTL | own_BTL
    elif rule.window:
        seen_BTL &= token_L > position_BT[:, :, None] - rule.window
    slots_BL = torch.where(seen_BTL.any(1), slots_BL, 0)
    # What no row of a segment sees may be anything, even NaN, which a weight of zero would not hide.
    hidden_BL11 = ~seen_BTL.any(1)[:, :, None, None]
    keys_BKLD = keys_SKD[slots_BL].masked_fill(hidden_BL11, 0).transpose(1, 2)
    values_BKLD = values_SKD[slots_BL].masked_fill(hidden_BL11, 0).transpose(1, 2)
    q_BTND = torch.cat([q_RND, q_RND.new_zeros(1, heads, dim)])[row_BT]
    q_BKXD = q_BTND.view(*row_BT.shape, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    # Rows that see nothing look at token 0, whose keys are zeros for them, and are zeroed in the end.
    blind_BT = ~seen_BTL.any(-1)
    allowed_BTL = seen_BTL | (blind_BT[:, :, None] & (token_L == 0))
    mask_BTL = torch.zeros(allowed_BTL.shape, dtype=q_RND.dtype, device=device).masked_fill_(
        ~allowed_BTL, float("-inf")
    )
    mask_B1XL = mask_BTL[:, None].repeat(1, 1, heads // kv_heads, 1)
    out_BKXD = masked_attention(q_BKXD, keys_BKLD, values_BKLD, mask_B1XL, rule)
    out_BTND = out_BKXD.view(len(row_BT), kv_heads, -1, batch.most_rows, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)
    out_BTND = out_BTND.masked_fill(blind_BT[:, :, None, None], 0)
    # Rows beyond a segment's own all go to a row that is cut off.
    wide_RND = torch.cat([out_RND, out_RND.new_zeros(1, heads, dim)])
    wide_RND.index_copy_(0, row_BT.flatten().long(), out_BTND.flatten(0, 1))
    out_RND.copy_(wide_RND[:rows])
