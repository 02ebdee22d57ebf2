"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Legend of shape suffixes: R rows, H hidden, N query heads of this rank, K key-value heads of this rank, D head
dimension, I intermediate part of this rank, S KV slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from lowlat.cache.groups import CacheGroup
from lowlat.cache.layout import KVLayout, KVPool
from lowlat.layers.attention import paged_attention
from lowlat.layers.norm import rms_norm
from lowlat.layers.rope import Rope, rotate
from lowlat.layers.step import StepInputs
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import DecoderConfig, read_config

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


class LlamaLayer:
    """One decoder layer on one rank."""

    def __init__(self, weights: _Weights, config: DecoderConfig, build: BuildContext, index: int) -> None:
        shard, pack = build.communicator.shard, build.platform.pack
        group = config.num_attention_heads // config.num_key_value_heads
        kv = shard.part(config.num_key_value_heads)
        heads_part = slice(kv.start * group * config.head_dim, kv.stop * group * config.head_dim)
        kv_part = slice(kv.start * config.head_dim, kv.stop * config.head_dim)
        mlp_part = shard.part(config.intermediate_size)
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        self.all_reduce = build.communicator.all_reduce
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.rotated_heads = (kv.stop - kv.start) * (group + 1)
        self.query_heads = (kv.stop - kv.start) * group
        self.input_norm_H = weights.read(f"{name}.input_layernorm.weight")
        self.mlp_norm_H = weights.read(f"{name}.post_attention_layernorm.weight")
        parts = [("q_proj", heads_part), ("k_proj", kv_part), ("v_proj", kv_part)]
        self.qkv = pack(torch.cat([weights.read(f"{attention}.{part}.weight", rows=rows) for part, rows in parts]))
        self.output = pack(weights.read(f"{attention}.o_proj.weight", columns=heads_part))
        gate_up = [weights.read(f"{name}.mlp.{part}_proj.weight", rows=mlp_part) for part in ("gate", "up")]
        self.gate_up = pack(torch.cat(gate_up))
        self.down = pack(weights.read(f"{name}.mlp.down_proj.weight", columns=mlp_part))

    def forward(
        self,
        x_RH: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """Add attention and MLP to the residual stream `x_RH`, in place."""
        qkv_RXD = self.qkv(rms_norm(x_RH, self.input_norm_H, self.eps)).view(len(x_RH), -1, self.head_dim)
        rotated_RXD = rotate(qkv_RXD[:, : self.rotated_heads], *rotation)
        real = step.real_rows
        keys_SKD.index_copy_(0, step.write_slots, rotated_RXD[:real, self.query_heads :])
        values_SKD.index_copy_(0, step.write_slots, qkv_RXD[:real, self.rotated_heads :])
        mixed = paged_attention(rotated_RXD[:, : self.query_heads], keys_SKD, values_SKD, step)
        x_RH += self.all_reduce(self.output(mixed))
        gate_RI, up_RI = self.gate_up(rms_norm(x_RH, self.mlp_norm_H, self.eps)).chunk(2, dim=-1)
        x_RH += self.all_reduce(self.down(F.silu(gate_RI).mul_(up_RI)))
        return x_RH


class Llama:
    """A Llama model on one rank of a tensor-parallel group."""

    def __init__(self, checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> None:
        self.config = config = read_config(checkpoint.config)
        self._communicator = build.communicator
        self._dtype = build.dtype
        weights = _Weights(checkpoint, build, progress)
        device = build.platform.device
        self.rope = Rope(config.head_dim, config.rope_theta, build.max_context, config.rope_scaling, device)
        self.embedding_VH = weights.read("model.embed_tokens.weight")
        self.layers = [LlamaLayer(weights, config, build, index) for index in range(config.num_hidden_layers)]
        self.norm_H = weights.read("model.norm.weight")
        part = build.communicator.shard.part(config.vocab_size)
        head = self.embedding_VH[part] if config.tie_word_embeddings else weights.read("lm_head.weight", rows=part)
        self.head = build.platform.pack(head)

    def cache_groups(self) -> list[CacheGroup]:
        """Keys and values of every token."""
        return [CacheGroup(name="kv", bytes_per_entry=self.kv_layout(1, 1).bytes_per_token)]

    def kv_layout(self, pages: int, page_size: int) -> KVLayout:
        """Layout of this rank's keys and values."""
        return KVLayout(
            layers=self.config.num_hidden_layers,
            kv_heads=self._communicator.shard.length(self.config.num_key_value_heads),
            head_dim=self.config.head_dim,
            page_size=page_size,
            pages=pages,
            dtype=str(self._dtype).removeprefix("torch."),
        )

    def forward(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        """Logits [samples, vocabulary] in float32; keys and values of the rows are written to `kv`."""
        x_RH = F.embedding(step.tokens_R, self.embedding_VH)
        rotation = self.rope.rows(step.positions_R, self._dtype)
        for layer, keys_SKD, values_SKD in zip(self.layers, kv.keys, kv.values, strict=True):
            x_RH = layer.forward(x_RH, rotation, keys_SKD, values_SKD, step)
        wanted = rms_norm(x_RH.index_select(0, step.sample_rows), self.norm_H, self.config.rms_norm_eps)
        return self._communicator.gather_columns(self.head(wanted), self.config.vocab_size).float()


class _Weights:
    """Reads weights in the model's type and reports how far it is."""

    def __init__(self, checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> None:
        self._checkpoint = checkpoint
        self._dtype = build.dtype
        self._device = build.platform.device
        self._progress = progress
        self._total = checkpoint.weight_bytes()
        self._done = 0

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """One weight, or a rank's part of it. Raises `CheckpointError` when it is missing."""
        tensor = self._checkpoint.tensor(name, self._dtype, rows=rows, columns=columns).to(self._device)
        self._done += tensor.numel() * tensor.element_size()
        self._progress(min(self._done, self._total), self._total)
        return tensor
