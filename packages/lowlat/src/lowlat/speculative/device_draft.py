"""Drafts whose guesses never leave the device: DFlash, DFlash 2, DSpark and small models inside a step's graph.

The networks are those of `draft_network` and `models`, with `DeviceOps` between their products. A block's own keys and
values lie behind the pages, so that rows beyond a request's pages have a place too.

Legend of shape suffixes: B padded requests, W rows of a block, R rows, G guesses, M = G * B, place by place, H hidden,
X taps * H, V vocabulary, Y heads of a packed projection, D head dimension, T batch slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch
import torch.nn.functional as F

from lowlat.cache.layout import KVLayout
from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceOps, DeviceStep, RowSegments
from lowlat.layers.rope import Rope
from lowlat.layers.verify import NO_END, SlotTables
from lowlat.platform.base import PackedLinear
from lowlat.speculative.draft_heads import edge_scores
from lowlat.speculative.draft_network import DraftLayer, DraftNetwork, GroupedMixing, capped

SHARPNESS = 1.25
"""Factor on a trained draft's logits where guesses are drawn: it is less sure than its target (measured on held-out
sessions)."""


Settings = tuple[torch.Tensor, torch.Tensor] | None
"""As `drawing.draw`: temperatures and seeds by batch slot. Guesses see the noise that the target's tokens will be drawn
with, but no filters: what those would remove is seldom drawn."""
Pack = Callable[[torch.Tensor], PackedLinear]
"""As `Platform.pack`."""


Guesses = tuple[torch.Tensor, torch.Tensor | None]
"""Tokens [B, count], int64, and how many of them are guesses, [B]; None: all."""


class DeviceDraft(Protocol):
    """Makes guesses for the slots of a step, on the device; nothing of it may ask the host."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """A request with these tokens takes a batch slot."""

    def propose(self, slots_B: torch.Tensor, count: int, longest: int, settings: Settings) -> Guesses:
        """`count` guesses or fewer of what follows each slot's newest token; rows of the padding slot are any tokens.
        `longest`: tokens that no request exceeds, where the step is not captured."""


class _Layer(msgspec.Struct):
    """Weights of a draft's layer, packed: queries, keys and values as one product, gate and up as one."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor, float]
    attention_mixing: GroupedMixing | None
    mlp_mixing: GroupedMixing | None

    @classmethod
    def of(cls, layer: DraftLayer, eps: float, pack: Pack) -> _Layer:
        return cls(
            pack(layer.qkv_weight()),
            pack(layer.o_proj.weight),
            pack(layer.gate_up_weight()),
            pack(layer.down_proj.weight),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            (layer.q_norm.weight, layer.k_norm.weight, eps),
            layer.attention_mixing,
            layer.mlp_mixing,
        )


class BlockDraft:
    """A block of masks in one forward, over the target's features."""

    def __init__(
        self,
        network: DraftNetwork,
        ops: DeviceOps,
        layout: KVLayout,
        tables: SlotTables,
        *,
        positions: int,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: PackedLinear,
        pack: Pack,
    ) -> None:
        """`network` is on the device and has the target's type. `layout`: the draft's own, with the target's pages.
        `positions`: the longest context and a block. `embed`, `head`: the target's."""
        config = network.config
        self.network, self.config, self._ops = network, config, ops
        self._embed, self._head = embed, head
        weight = network.fc.weight
        device, slots, block = weight.device, len(tables.lengths_T), config.block_size
        # The target's padding page is a page here; the rows of blocks come behind it.
        behind = -(-slots * block // layout.page_size)
        layout = msgspec.structs.replace(layout, pages=layout.pages + 1 + behind)
        shape = (layout.layers, layout.slots, layout.kv_heads, layout.head_dim)
        # Not zeroed: no step reads a slot that none wrote.
        self.keys_LSKD, self.values_LSKD = (torch.empty(shape, dtype=weight.dtype, device=device) for _ in range(2))
        self._block_base = (tables.padding_page + 1) * layout.page_size
        self._places_R = torch.arange(slots * block, device=device) + self._block_base
        self._masks_BG = torch.full((slots, block - 1), config.mask_token_id, dtype=torch.int64, device=device)
        no_ends_T = torch.full_like(tables.ends_T, NO_END)
        widths_T = torch.full_like(tables.widths_T, block)
        widths_T[-1] = 0
        self._tables = msgspec.structs.replace(tables, ends_T=no_ends_T, widths_T=widths_T)
        self._rope = Rope(config.head_dim, config.rope_theta, positions, None, device).tables
        layers = [layer for layer in network.layers if isinstance(layer, DraftLayer)]
        self._layers = [_Layer.of(layer, config.rms_norm_eps, pack) for layer in layers]
        keys_and_values = [part.weight for layer in layers for part in (layer.k_proj, layer.v_proj)]
        self._kv = pack(torch.cat(keys_and_values))
        """Keys and values of all layers, which see the same features."""
        self._key_norms = torch.stack([layer.k_norm.weight for layer in layers]), config.rms_norm_eps
        self._fc = pack(weight)
        self._places_V: torch.Tensor | None = None
        """By token: its place among those that the draft can guess; None: all of them."""
        if network.vocabulary is not None:
            self._places_V = network.places(torch.arange(config.vocab_size, device=device))
        self._rule = AttentionRule(window=config.sliding_window)

    def extend(self, features_RX: torch.Tensor, positions_R: torch.Tensor, write_slots_R: torch.Tensor) -> None:
        """Write keys and values of the target's rows. Rows of wrong guesses are overwritten later."""
        ops, tables, norm = self._ops, self._tables, self.network.hidden_norm.weight
        u_RH = ops.product(features_RX, self._fc)
        step = DeviceStep(positions_R, positions_R, write_slots_R, [], tables.pages_TP, tables.page_size, None)
        kv_RC, _ = ops.add_norm_product(None, u_RH, norm, self.config.rms_norm_eps, self._kv)
        kv_RLYD = kv_RC.view(len(u_RH), len(self._layers), -1, self.config.head_dim)
        ops.write_layers(kv_RLYD, self.keys_LSKD, self.values_LSKD, step, self._rope, self._key_norms)

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """What it needs comes with the target's rows."""

    def propose(self, slots_B: torch.Tensor, count: int, longest: int, settings: Settings) -> Guesses:
        """See `DeviceDraft`."""
        config, requests = self.config, len(slots_B)
        block = config.block_size
        rows = self._ops.begin_rows(slots_B, self._tables, self._masks_BG[:requests], None)
        batch = RowSegments(
            rows.slots_B,
            rows.first_B,
            rows.rows_B,
            rows.lengths_B,
            most_rows=block,
            longest=longest + block,
            tight=True,
        )
        places_R = self._places_R[: requests * block]
        where = (self._tables.pages_TP, self._tables.page_size, None)
        step = DeviceStep(rows.tokens_R, rows.positions_R, places_R, [batch], *where, block_base=self._block_base)
        x_RH, residual_RH = self._states(step)
        first = 0 if config.kind == "dspark" else 1

        def wanted(rows_RH: torch.Tensor) -> torch.Tensor:
            return rows_RH.view(requests, block, -1)[:, first : first + count].transpose(0, 1).flatten(0, 1)

        norm, eps = self.network.norm.weight, config.rms_norm_eps
        last = wanted(x_RH).contiguous(), wanted(residual_RH).contiguous(), norm, eps
        normed_MH = None
        if config.kind == "dflash2":
            normed_MH = self._ops.add_norm(*last)
            logits_MV = self._ops.product(normed_MH, self._head)
        else:
            logits_MV, _ = self._ops.add_norm_product(*last, self._head)
        logits_MV = capped(logits_MV, config)
        next_M = rows.next_R.view(requests, block)[:, :count].t().reshape(-1)
        logits_GBV, next_GB = logits_MV.view(count, requests, -1), next_M.view(count, requests)
        anchor_B = rows.tokens_R.view(requests, block)[:, 0].contiguous()
        if config.kind == "dspark":
            network, known = self.network, self.network.vocabulary
            first_B = anchor_B if self._places_V is None else self._looked_up(anchor_B, self._places_V)
            embed_XE, head_VE = network.get_parameter("markov_embed.weight"), network.markov_head.weight
            choice = (slots_B, next_GB, settings, known, SHARPNESS)
            return self._tokens(self._ops.walk(logits_GBV, first_B, embed_XE, head_VE, *choice)), None
        if normed_MH is not None:
            normed_GBH = normed_MH.view(count, requests, -1)
            return self._select(logits_GBV, normed_GBH, anchor_B, slots_B, next_GB, settings), None
        known = self.network.vocabulary
        places_M = self._ops.draw(logits_MV, slots_B.repeat(count), next_M, settings, known, SHARPNESS).clamp(min=0)
        return self._tokens(places_M.view(count, requests).t().contiguous()), None

    def _tokens(self, places: torch.Tensor) -> torch.Tensor:
        known = self.network.vocabulary
        return places if known is None else self._looked_up(places, known)

    def _looked_up(self, places: torch.Tensor, table_V: torch.Tensor) -> torch.Tensor:
        return self._ops.look_up(places.flatten(), table_V[:, None]).view_as(places)

    def _states(self, step: DeviceStep) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last layer adds to the residual stream of block rows, and the stream before it."""
        residual_RH, x_RH = self._embed(step.tokens_R).to(self.network.fc.weight.dtype), None
        for layer, keys_SKD, values_SKD in zip(self._layers, self.keys_LSKD, self.values_LSKD, strict=True):
            x_RH, residual_RH = self._layer(layer, x_RH, residual_RH, keys_SKD, values_SKD, step)
        assert x_RH is not None
        return x_RH, residual_RH

    def _layer(
        self,
        layer: _Layer,
        x_RH: torch.Tensor | None,
        residual_RH: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ops, eps = self._ops, self.config.rms_norm_eps

        def attention(qkv_RC: torch.Tensor) -> torch.Tensor:
            qkv_RYD = qkv_RC.view(len(qkv_RC), -1, self.config.head_dim)
            where = (keys_SKD, values_SKD, step, self._rope, layer.norms)
            return ops.product(ops.rope_attend(qkv_RYD, *where, self._rule), layer.output)

        if layer.attention_mixing is None:
            qkv_RC, residual_RH = ops.add_norm_product(x_RH, residual_RH, layer.input_norm, eps, layer.qkv)
            x_RH = attention(qkv_RC)
        else:
            y_RH = self._normed(x_RH, residual_RH, layer.input_norm)
            x_RH = self._mixed(layer.attention_mixing, y_RH, lambda y_RH: attention(ops.product(y_RH, layer.qkv)))
        if layer.mlp_mixing is None:
            active_RI, residual_RH = ops.add_norm_product(x_RH, residual_RH, layer.mlp_norm, eps, layer.gate_up, "silu")
            return ops.product(active_RI, layer.down), residual_RH

        def mlp(y_RH: torch.Tensor) -> torch.Tensor:
            gate_RI, up_RI = ops.product(y_RH, layer.gate_up).chunk(2, dim=-1)
            return ops.product(F.silu(gate_RI) * up_RI, layer.down)

        return self._mixed(layer.mlp_mixing, self._normed(x_RH, residual_RH, layer.mlp_norm), mlp), residual_RH

    def _normed(self, x_RH: torch.Tensor | None, residual_RH: torch.Tensor, norm_H: torch.Tensor) -> torch.Tensor:
        """The norm of the residual stream, to which `x_RH` is added in place."""
        eps = self.config.rms_norm_eps
        if x_RH is None:
            return self._ops.norm(residual_RH, norm_H, eps)
        return self._ops.add_norm(x_RH, residual_RH, norm_H, eps)

    def _mixed(
        self, mixing: GroupedMixing, x_RH: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        x_QBH = x_RH.view(-1, self.config.block_size, x_RH.shape[-1])
        coefficients = mixing.coefficients(x_QBH)
        inner_QBH = sublayer(mixing.mix(x_QBH, coefficients, 0).flatten(0, 1)).view_as(x_QBH)
        return mixing.mix(inner_QBH, coefficients, 1).flatten(0, 1)

    def _select(
        self,
        logits_GBV: torch.Tensor,
        normed_GBH: torch.Tensor,
        token_B: torch.Tensor,
        slots_B: torch.Tensor,
        next_GB: torch.Tensor,
        settings: Settings,
    ) -> torch.Tensor:
        tokens = []
        for logits_BV, normed_BH, next_B in zip(logits_GBV, normed_GBH, next_GB, strict=True):
            scores_BC, candidates_BC = edge_scores(self.network, logits_BV, normed_BH, token_B)
            scores_BV = torch.full_like(logits_BV, float("-inf")).scatter_(1, candidates_BC, scores_BC)
            token_B = self._ops.draw(scores_BV, slots_B, next_B, settings, None, SHARPNESS).clamp(min=0)
            tokens.append(token_B)
        return torch.stack(tokens, 1)


class SmallModelDraft:
    """A small model of the same vocabulary, token after token. It computes every row that the target computes, as the
    target's taps; a checked guess twice, in return nothing has to be known about which of its entries are right."""

    def __init__(self, forward: Callable[[DeviceStep], torch.Tensor], ops: DeviceOps, tables: SlotTables) -> None:
        """`forward`: logits of a step, whose keys and values are written to pools with the target's pages."""
        self._forward, self._ops, self._tables = forward, ops, tables

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """What it needs comes with the target's rows."""

    def propose(self, slots_B: torch.Tensor, count: int, longest: int, settings: Settings) -> Guesses:
        """See `DeviceDraft`."""
        tables, size = self._tables, self._tables.page_size
        before_B, token_B = tables.lengths_T[slots_B], tables.tokens_T[slots_B]
        room_B = tables.widths_T[slots_B].minimum(tables.ends_T[slots_B] - before_B)
        narrow_B, first_B = slots_B.int(), torch.arange(len(slots_B), dtype=torch.int32, device=slots_B.device)
        tokens = []
        for place in range(count):
            real_B = room_B > place
            position_B = (before_B + place).where(real_B, 0)
            page_B = tables.pages_TP[slots_B, position_B // size].long().where(real_B, tables.padding_page)
            length_B = (position_B + 1).where(real_B, 0).int()
            batch = RowSegments(narrow_B, first_B, real_B.int(), length_B, most_rows=1, longest=longest)
            where = (position_B, page_B * size + position_B % size, [batch], tables.pages_TP, size, None)
            logits_BV = self._forward(DeviceStep(token_B, *where))
            token_B = self._ops.draw(logits_BV, slots_B, before_B + place + 1, settings).clamp(min=0)
            tokens.append(token_B)
        return torch.stack(tokens, 1), None
