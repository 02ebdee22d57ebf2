"""The decoder that Llama and its relatives share: grouped-query attention with rotary positions, gated MLPs or experts.

A family is a `Family`: what differs from Llama. Its file reads the configuration, fills in a `Family` and gives it to
`Decoder`.

Legend of shape suffixes: R rows, H hidden, N query heads of this rank, K key-value heads of this rank, X = N + K
rotated heads, D head dimension, I intermediate part of this rank, S KV slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F

from lowlat.cache.groups import CacheGroup
from lowlat.cache.layout import KVLayout, KVPool
from lowlat.layers.activation import GATED, GatedActivation
from lowlat.layers.attention import AttentionRule, paged_attention
from lowlat.layers.linear import split_inputs, split_outputs
from lowlat.layers.norm import head_norm, rms_norm
from lowlat.layers.rope import Rope, rotate
from lowlat.layers.step import StepInputs
from lowlat.layers.window import within_window
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import DecoderConfig
from lowlat.models.weights import Weights

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

MLP = Callable[[torch.Tensor, int], torch.Tensor]
"""(normalised rows [R, H], real rows) to what is added to the residual stream, summed over the ranks."""
Rotation = tuple[torch.Tensor, torch.Tensor]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a family of decoders has that Llama has not. All fields have Llama's value by default."""

    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    """RMSNorm over each head's query and key before rotation (QK-norm)."""
    sinks: bool = False
    """Each head has a score of attention to nothing."""
    attention_scale: float | None = None
    """Factor on attention scores; None: 1 / sqrt(D)."""
    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and before the MLP, and where there are four, also those of their results."""
    norm_offset: float = 0.0
    """Added to every stored norm weight."""
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are cap tanh(logits / cap)."""
    mlp: Callable[[Weights, BuildContext, DecoderConfig, int], MLP] | None = None
    """Makes a layer's MLP; None: a gated one."""


class GatedMLP:
    """down(activation(gate(x)) up(x)) on one rank."""

    def __init__(self, weights: Weights, build: BuildContext, config: DecoderConfig, index: int) -> None:
        name = f"model.layers.{index}.mlp"
        platform, shard = build.platform, build.communicator.shard
        part = shard.part(config.intermediate_size)
        parts = [(f"{name}.gate_proj", part), (f"{name}.up_proj", part)]
        self.gate_up = split_outputs(weights.read, platform, parts, bias=config.mlp_bias)
        self.down = split_inputs(weights.read, platform, shard, f"{name}.down_proj", part, bias=config.mlp_bias)
        self.activation: GatedActivation = GATED[config.activation]
        self.all_reduce = build.communicator.all_reduce

    def __call__(self, x_RH: torch.Tensor, real_rows: int) -> torch.Tensor:
        gate_RI, up_RI = self.gate_up(x_RH).chunk(2, dim=-1)
        return self.all_reduce(self.down(self.activation(gate_RI, up_RI)))


class DecoderLayer:
    """One layer on one rank. Ranks hold whole key-value heads with all their query heads."""

    def __init__(
        self, weights: Weights, build: BuildContext, config: DecoderConfig, family: Family, index: int
    ) -> None:
        platform, shard, dim = build.platform, build.communicator.shard, config.head_dim
        group = config.num_attention_heads // config.num_key_value_heads
        kv = shard.part(config.num_key_value_heads)
        heads = slice(kv.start * group, kv.stop * group)
        heads_part, kv_part = slice(heads.start * dim, heads.stop * dim), slice(kv.start * dim, kv.stop * dim)
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        self.window = config.windows[index]
        self.eps = config.rms_norm_eps
        self.head_dim = dim
        self.query_heads = heads.stop - heads.start
        self.rotated_heads = self.query_heads + kv.stop - kv.start
        self.all_reduce = build.communicator.all_reduce
        norms = [weights.norm(f"{name}.{norm}.weight", family.norm_offset) for norm in family.norm_names]
        self.input_norm_H, self.mlp_norm_H = norms[:2]
        self.attention_out_norm_H = norms[2] if norms[2:] else None
        self.mlp_out_norm_H = norms[3] if norms[2:] else None
        parts = [
            (f"{attention}.{part}_proj", rows) for part, rows in zip("qkv", (heads_part, kv_part, kv_part), strict=True)
        ]
        self.qkv = split_outputs(weights.read, platform, parts, bias=family.qkv_bias)
        self.output = split_inputs(
            weights.read, platform, shard, f"{attention}.o_proj", heads_part, bias=family.output_bias
        )
        self.head_norm_XD: torch.Tensor | None = None
        if family.head_norms:
            query_D = weights.norm(f"{attention}.q_norm.weight", family.norm_offset)
            key_D = weights.norm(f"{attention}.k_norm.weight", family.norm_offset)
            key_heads = self.rotated_heads - self.query_heads
            self.head_norm_XD = torch.cat([query_D.expand(self.query_heads, -1), key_D.expand(key_heads, -1)])
        sinks_N = weights.read(f"{attention}.sinks", rows=heads) if family.sinks else None
        self.rule = AttentionRule(scale=family.attention_scale, window=self.window, sinks_N=sinks_N)
        self.mlp = (family.mlp or GatedMLP)(weights, build, config, index)

    def forward(
        self,
        x_RH: torch.Tensor,
        rotation: Rotation,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """Add attention and MLP to the residual stream `x_RH`, in place."""
        qkv_RYD = self.qkv(rms_norm(x_RH, self.input_norm_H, self.eps)).view(len(x_RH), -1, self.head_dim)
        heads_RXD = qkv_RYD[:, : self.rotated_heads]
        if self.head_norm_XD is not None:
            heads_RXD = head_norm(heads_RXD, self.head_norm_XD, self.eps)
        rotated_RXD = rotate(heads_RXD, *rotation)
        real = step.real_rows
        keys_SKD.index_copy_(0, step.write_slots, rotated_RXD[:real, self.query_heads :])
        values_SKD.index_copy_(0, step.write_slots, qkv_RYD[:real, self.rotated_heads :])
        mixed = paged_attention(rotated_RXD[:, : self.query_heads], keys_SKD, values_SKD, step, self.rule)
        attention_RH = self.all_reduce(self.output(mixed))
        if self.attention_out_norm_H is not None:
            attention_RH = rms_norm(attention_RH, self.attention_out_norm_H, self.eps)
        x_RH += attention_RH
        mlp_RH = self.mlp(rms_norm(x_RH, self.mlp_norm_H, self.eps), real)
        if self.mlp_out_norm_H is not None:
            mlp_RH = rms_norm(mlp_RH, self.mlp_out_norm_H, self.eps)
        x_RH += mlp_RH
        return x_RH


class Taps(msgspec.Struct, frozen=True):
    """States wanted after some layers: `take` gets them side by side, [R, layers * H], in the order of the layers, and
    before logits are computed."""

    layers: tuple[int, ...]
    take: Callable[[torch.Tensor, StepInputs], object]


class Decoder:
    """A decoder of one family, on one rank of a tensor-parallel group."""

    sees_items = True
    """Its attention heeds `StepInputs.items`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        build: BuildContext,
        progress: LoadProgress,
        config: DecoderConfig,
        family: Family,
    ) -> None:
        self.config = config
        self._communicator = build.communicator
        self._dtype = build.dtype
        weights = Weights(checkpoint, build, progress)
        self.ropes = _ropes(config, build)
        self.embedding_VH = weights.read("model.embed_tokens.weight")
        # Rounded to the model's type, as the families that scale their embeddings were trained.
        self.embedding_scale = torch.tensor(family.embedding_scale, dtype=build.dtype).item()
        self.logit_cap = family.logit_cap
        self.layers = [DecoderLayer(weights, build, config, family, index) for index in range(config.num_hidden_layers)]
        self.norm_H = weights.norm("model.norm.weight", family.norm_offset)
        self.taps: Taps | None = None
        """Who looks at states inside the model; None: nobody, at no cost."""
        part = build.communicator.shard.part(config.vocab_size)
        head = self.embedding_VH[part] if config.tie_word_embeddings else weights.read("lm_head.weight", rows=part)
        self.head = build.platform.pack(head)

    def cache_groups(self) -> list[CacheGroup]:
        """Keys and values: of every token, and of the last ones in layers with a window."""
        layout = self.kv_layout(1, 1)
        windowed, window = len(layout.window_layers), max(self.config.windows)
        groups = []
        if windowed < layout.layers:
            size = (layout.layers - windowed) * layout.bytes_per_layer
            groups.append(CacheGroup(name="kv", bytes_per_entry=size))
        if windowed:
            size = windowed * layout.bytes_per_layer
            groups.append(CacheGroup(name="kv.window", bytes_per_entry=size, lifetime="window", window=window))
        return groups

    def kv_layout(self, pages: int, page_size: int) -> KVLayout:
        """Layout of this rank's keys and values."""
        return KVLayout(
            layers=self.config.num_hidden_layers,
            kv_heads=self._communicator.shard.length(self.config.num_key_value_heads),
            head_dim=self.config.head_dim,
            page_size=page_size,
            pages=pages,
            dtype=str(self._dtype).removeprefix("torch."),
            window_layers=frozenset(layer for layer, window in enumerate(self.config.windows) if window),
        )

    def forward(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        """Logits [samples, vocabulary] in float32; keys and values of the rows are written to `kv`."""
        return self.logits(self.states(step, kv).index_select(0, step.sample_rows))

    def states(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        """Last states [R, H] of all rows, before the last norm; keys and values are written to `kv`."""
        x_RH = self.embed(step.tokens_R)
        views = {
            window: (rope.rows(step.positions_R, self._dtype), within_window(step, window) if window else step)
            for window, rope in self.ropes.items()
        }
        features: list[torch.Tensor] = []
        for index, (layer, keys_SKD, values_SKD) in enumerate(zip(self.layers, kv.keys, kv.values, strict=True)):
            rotation, seen = views[layer.window]
            x_RH = layer.forward(x_RH, rotation, keys_SKD, values_SKD, seen)
            if self.taps is not None and index in self.taps.layers:
                features.append(x_RH.clone())  # the layers after this one add to it in place
        if self.taps is not None:
            self.taps.take(torch.cat(features, dim=-1) if features else x_RH[:, :0], step)
        return x_RH

    def embed(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] of the embedding, as the first layer gets them."""
        x_RH = F.embedding(tokens_R, self.embedding_VH)
        return x_RH * self.embedding_scale if self.embedding_scale != 1.0 else x_RH

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary] in float32 of last states."""
        wanted = rms_norm(x_RH, self.norm_H, self.config.rms_norm_eps)
        logits = self.gather_columns(self.head(wanted)).float()
        return logits if self.logit_cap is None else torch.tanh(logits / self.logit_cap) * self.logit_cap

    def gather_columns(self, logits_MC: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns of logits."""
        return self._communicator.gather_columns(logits_MC, self.config.vocab_size)


def _ropes(config: DecoderConfig, build: BuildContext) -> dict[int, Rope]:
    """Rotary tables by the layers' window; one table serves all windows unless they have frequencies of their own."""
    device, context, dim = build.platform.device, build.max_context, config.head_dim
    windows = set(config.windows)
    ropes: dict[int, Rope] = {}
    if config.window_rope_theta is None or 0 in windows:
        ropes = dict.fromkeys(windows, Rope(dim, config.rope_theta, context, config.rope_scaling, device))
    if config.window_rope_theta is not None:
        local = Rope(dim, config.window_rope_theta, context, None, device)
        ropes |= dict.fromkeys(windows - {0}, local)
    return ropes
