"""The attention sublayer of V4 and V4.1, and the compressed entries that it writes and selects.

Legend of shape suffixes: R rows, H hidden, Q query latent, N heads of this rank, D head dimension, K keys a row,
E entries, I index heads, G output groups of this rank.
"""

from __future__ import annotations

import msgspec
import torch

from lowlat.layers import deepseek_attention as ops
from lowlat.layers.deepseek_numerics import Numerics, linear, project, rms_norm
from lowlat.layers.deepseek_rope import TailRope
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.step import StateSegment
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import Communicator


class Rows(msgspec.Struct):
    """The rows of a step as attention sees them; what index layers select passes through `chosen` and `candidates`.

    `chosen[layer][s]`: entry ids [rows, K] of segment s, -1 for none; `candidates[s]`: block ids [rows, B].
    `entries_written`: the next layer's compressed entries were written already, for more rows than these.
    """

    positions_R: torch.Tensor
    segments: list[StateSegment]
    chosen: dict[int, list[torch.Tensor]]
    candidates: list[torch.Tensor]
    entries_written: bool = False


class AttentionBase:
    """What backbone and draft attention share: projections, window entries, grouped output."""

    def __init__(
        self, weights: Weights, name: str, config: DeepseekConfig, communicator: Communicator, rope: TailRope
    ) -> None:
        groups = communicator.shard.part(config.o_groups)
        heads_a_group = config.num_attention_heads // config.o_groups
        heads = slice(groups.start * heads_a_group, groups.stop * heads_a_group)
        self.config, self.numerics, self.rope = config, weights.numerics, rope
        self.all_reduce = communicator.all_reduce
        self.groups = groups.stop - groups.start
        self.wq_a = weights.fp8(f"{name}.wq_a")
        self.q_norm = weights.values(f"{name}.q_norm.weight")
        dim = config.head_dim
        self.wq_b = weights.fp8(f"{name}.wq_b", rows=slice(heads.start * dim, heads.stop * dim))
        self.wkv = weights.fp8(f"{name}.wkv")
        self.kv_norm = weights.values(f"{name}.kv_norm.weight")
        lora = slice(groups.start * config.o_lora_rank, groups.stop * config.o_lora_rank)
        self.wo_a = weights.fp8(f"{name}.wo_a", rows=lora)
        self.wo_b = weights.fp8(f"{name}.wo_b", columns=lora)
        self.sinks_N = weights.values(f"{name}.attn_sink", rows=heads)

    def query(self, x_RH: torch.Tensor, positions_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The query latent [R, Q] and rotated queries [R, N, D]."""
        config, numerics = self.config, self.numerics
        latent_RQ = rms_norm(linear(x_RH, self.wq_a, numerics), self.q_norm, config.rms_norm_eps, numerics)
        q_RND = linear(latent_RQ, self.wq_b, numerics).view(len(x_RH), -1, config.head_dim)
        if not config.v41:
            q_RND = rms_norm(q_RND, None, config.rms_norm_eps, numerics)
        return latent_RQ, numerics.store(self.rope.rotate(q_RND, positions_R))

    def window_values(self, x_RH: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Window entries [R, D], rotated, before their encoding."""
        numerics = self.numerics
        kv_RD = rms_norm(linear(x_RH, self.wkv, numerics), self.kv_norm, self.config.rms_norm_eps, numerics)
        return numerics.store(self.rope.rotate(kv_RD, positions_R))

    def output(self, o_RND: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Inverse rotation and the grouped output projection, summed over ranks: [R, H]."""
        numerics = self.numerics
        o_RND = numerics.store(self.rope.rotate(o_RND, positions_R, inverse=True))
        o_RGX = numerics.activation(o_RND.reshape(len(o_RND), self.groups, -1))
        wo_a = self.wo_a.dense(numerics).view(self.groups, self.config.o_lora_rank, -1)
        z_RX = numerics.store(torch.einsum("rgx,gox->rgo", o_RGX, wo_a)).flatten(1)
        return numerics.store(self.all_reduce(project(z_RX, self.wo_b, numerics)))


class Attention(AttentionBase):
    """One backbone layer's attention."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        config: DeepseekConfig,
        communicator: Communicator,
        rope: TailRope,
    ) -> None:
        super().__init__(weights, name, config, communicator, rope)
        self.layer = layer
        self.ratio = config.compress_ratios[layer]
        self.compressors: list[Compressor] = []
        if config.is_kv_source(layer):
            self.compressors.append(Compressor(weights, f"{name}.compressor", "compressor", layer, config))
            if config.v41:
                self.index_key = weights.plain(f"{name}.indexer.wk")
                self.index_key_norm = weights.values(f"{name}.indexer.k_norm.weight")
            elif config.has_index_keys(layer):
                self.compressors.append(
                    Compressor(weights, f"{name}.indexer.compressor", "indexer.compressor", layer, config)
                )
        self.selects = config.is_index_source(layer)
        if self.selects:
            self.index_query = weights.fp8(f"{name}.indexer.wq_b")
            self.index_weights = weights.plain(f"{name}.indexer.weights_proj")

    def forward(self, x_RH: torch.Tensor, rows: Rows, caches: DeepseekCaches) -> torch.Tensor:
        """Attention of all rows over windows and selected entries, [R, H]; writes what the layer keeps."""
        latent_RQ, q_RND = self.query(x_RH, rows.positions_R)
        values_RD = self.window_values(x_RH, rows.positions_R)
        if not rows.entries_written:
            self.write_entries(x_RH, rows, caches)
        if self.selects:
            self._select(x_RH, latent_RQ, rows, caches)
        window = caches.windows[self.layer]
        own_RD = window.entries.round(values_RD)
        o_RND = torch.empty_like(q_RND)
        for index, segment in enumerate(rows.segments):
            chosen = self._chosen(index, segment, rows)
            o_RND[segment.span] = self._attend(q_RND[segment.span], own_RD[segment.span], chosen, segment, caches)
            window.write(segment.state, segment.start, values_RD[segment.span])
        return self.output(o_RND, rows.positions_R)

    def write_entries(self, x_RH: torch.Tensor, rows: Rows, caches: DeepseekCaches) -> None:
        """Compressed entries and index keys of windows that end in this step; nothing for layers that own none."""
        for compressor in self.compressors:
            for segment, entries, latent in compressor.forward(x_RH, rows, caches):
                at = entries * self.ratio
                slots = caches.entry_slots(segment, self.layer, entries)
                if compressor.kind == "compressor":
                    main = self.numerics.store(self.rope.rotate(latent, at))
                    caches.main[self.layer].write(slots, main)
                key = self._index_key(latent, compressor.kind)
                if key is not None:
                    caches.keys[self.layer].write(slots, self.numerics.store(self.rope.rotate(key, at)))

    def _index_key(self, latent_ED: torch.Tensor, kind: str) -> torch.Tensor | None:
        """Index keys before rotation: V4.1 projects the latent, V4 has a compressor of its own."""
        if not self.config.v41:
            return latent_ED if kind == "indexer.compressor" else None
        key = linear(latent_ED, self.index_key, self.numerics)
        return rms_norm(key, self.index_key_norm, self.config.rms_norm_eps, self.numerics)

    def _chosen(self, index: int, segment: StateSegment, rows: Rows) -> torch.Tensor | None:
        """Entry ids [rows, K] of a segment; None: the layer has no compressed entries."""
        if self.ratio == 0:
            return None
        if self.config.v41 or self.selects:
            return rows.chosen[self.config.index_source(self.layer)][index]
        visible = (rows.positions_R[segment.span] + 1) // self.ratio
        ids = torch.arange(max(1, segment.length // self.ratio)).expand(segment.rows, -1)
        return ids.masked_fill(ids >= visible.unsqueeze(1), -1)

    def _select(self, x_RH: torch.Tensor, latent_RQ: torch.Tensor, rows: Rows, caches: DeepseekCaches) -> None:
        config, numerics = self.config, self.numerics
        heads, dim = config.index_n_heads, config.index_head_dim
        q_RID = linear(latent_RQ, self.index_query, numerics).view(-1, heads, dim)
        q_RID = numerics.index_query(numerics.store(self.rope.rotate(q_RID, rows.positions_R)))
        weights_RI = project(x_RH, self.index_weights, numerics) * heads**-0.5 * dim**-0.5
        source = config.kv_source(self.layer)
        chosen = []
        for index, segment in enumerate(rows.segments):
            positions = rows.positions_R[segment.span]
            # One entry at least, so that shapes are never empty; it is masked where it is not visible.
            entries = torch.arange(max(1, segment.length // self.ratio))
            keys = caches.keys[source].read(caches.entry_slots(segment, source, entries)).to(numerics.compute)
            visible = entries < ((positions + 1) // self.ratio).unsqueeze(1)
            # An entry that was never written may hold anything; nothing of it may reach a product.
            keys = keys.masked_fill(~visible.any(0).unsqueeze(1), 0.0)
            scores = ops.index_scores(q_RID[segment.span], weights_RI[segment.span], keys)
            allowed = self._allowed(scores, visible, positions, index, rows)
            chosen.append(ops.select(scores, allowed, config.index_topk))
        rows.chosen[self.layer] = chosen

    def _allowed(
        self, scores: torch.Tensor, visible: torch.Tensor, positions: torch.Tensor, index: int, rows: Rows
    ) -> torch.Tensor:
        """What may be selected: all visible entries, or for late index layers those in the candidate blocks."""
        config = self.config
        origin, size = config.candidate_source_layer_id, config.candidate_block_size
        if origin < 0 or self.layer < origin:
            return visible
        if self.layer == origin:
            rows.candidates.append(
                ops.candidate_blocks(scores, visible, positions, size=size, count=config.candidate_topk_blocks)
            )
            return visible
        return visible & ops.in_blocks(rows.candidates[index], visible.shape[1], size)

    def _attend(
        self,
        q_TND: torch.Tensor,
        own_TD: torch.Tensor,
        chosen_TE: torch.Tensor | None,
        segment: StateSegment,
        caches: DeepseekCaches,
    ) -> torch.Tensor:
        """One segment: [T, N, D]."""
        window = self.config.sliding_window
        first = max(0, segment.start - window + 1)
        past = caches.windows[self.layer].read(segment.state, first, segment.start).to(own_TD.dtype)
        near_KD = torch.cat([past, own_TD])
        width = window + (0 if chosen_TE is None else chosen_TE.shape[1])
        block = ops.row_block(width * near_KD.shape[1])
        parts = []
        for begin in range(0, segment.rows, block):
            end = min(segment.rows, begin + block)
            positions = torch.arange(segment.start + begin, segment.start + end)
            at = positions.unsqueeze(1) + torch.arange(1 - window, 1)
            seen = at >= max(0, segment.floor)
            keys = near_KD[(at - first).clamp_min(0)]
            if chosen_TE is not None:
                ids = chosen_TE[begin:end]
                keys = torch.cat([keys, self._entries(ids, segment, caches).to(keys.dtype)], 1)
                seen = torch.cat([seen, ids >= 0], 1)
            # What is not seen may hold anything, also what is not a number.
            keys = keys.masked_fill(~seen.unsqueeze(-1), 0.0)
            parts.append(ops.attend(q_TND[begin:end], keys, seen, self.sinks_N))
        return torch.cat(parts)

    def _entries(self, ids_TE: torch.Tensor, segment: StateSegment, caches: DeepseekCaches) -> torch.Tensor:
        source = self.config.kv_source(self.layer)
        slots = caches.entry_slots(segment, source, ids_TE.clamp_min(0))
        return caches.main[source].read(slots)


class Compressor:
    """Turns tokens into entries: a window of `ratio` tokens each, gated (not for ratio 1)."""

    def __init__(self, weights: Weights, name: str, kind: str, layer: int, config: DeepseekConfig) -> None:
        self.kind, self.layer, self.config = kind, layer, config
        self.numerics: Numerics = weights.numerics
        self.ratio = config.compress_ratios[layer]
        self.overlap = self.ratio == 4 and not config.v41
        self.content = weights.plain(f"{name}.wkv")
        self.gate = weights.plain(f"{name}.wgate") if self.ratio > 1 else None
        self.ape = None if config.v41 else weights.values(f"{name}.ape")
        self.norm = weights.values(f"{name}.norm.weight")

    def forward(
        self, x_RH: torch.Tensor, rows: Rows, caches: DeepseekCaches
    ) -> list[tuple[StateSegment, torch.Tensor, torch.Tensor]]:
        """For each segment: entry ids and their normed latents [E, D]; advances the ring."""
        numerics = self.numerics
        content_RD = numerics.keep_float32(project(x_RH, self.content, numerics))
        result = []
        if self.gate is None:
            for segment in rows.segments:
                begin = max(segment.start, segment.write_from)
                if begin >= segment.length:
                    continue  # all rows are replayed: their entries exist
                entries = torch.arange(begin, segment.length)
                result.append((segment, entries, self._normed(content_RD[segment.span][begin - segment.start :])))
            return result
        gate_RD = numerics.keep_float32(project(x_RH, self.gate, numerics))
        if self.ape is not None:
            gate_RD = numerics.keep_float32(gate_RD + self.ape[rows.positions_R % self.ratio])
        both_RX = torch.cat([content_RD, gate_RD], -1)
        ring = caches.rings[f"{self.layer}.{self.kind}"]
        for segment in rows.segments:
            first_entry, end_entry = segment.start // self.ratio, segment.length // self.ratio
            previous = self.overlap and first_entry > 0
            begin = (first_entry - previous) * self.ratio
            past = ring.read(segment.state, begin, segment.start).to(both_RX.dtype)
            tokens = torch.cat([past, both_RX[segment.span]])[: end_entry * self.ratio - begin]
            ring.write(segment.state, segment.start, both_RX[segment.span])
            # A replay begins on an entry's edge; entries before `write_from` exist already.
            skip = max(0, -(-segment.write_from // self.ratio) - first_entry)
            if end_entry - first_entry > skip:
                content, gate = tokens.chunk(2, -1)
                made = ops.compress(content, gate, ratio=self.ratio, overlap=self.overlap, previous=previous)
                result.append((segment, torch.arange(first_entry + skip, end_entry), self._normed(made[skip:])))
        return result

    def _normed(self, made_ED: torch.Tensor) -> torch.Tensor:
        return rms_norm(self.numerics.store(made_ED), self.norm, self.config.rms_norm_eps, self.numerics)
