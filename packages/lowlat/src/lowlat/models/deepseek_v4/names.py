"""Every weight of the published checkpoints: name, format, shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from lowlat.models.deepseek_v4.config import DeepseekConfig

Kind = Literal["fp8", "fp4", "table", "bf16", "fp32", "int64"]


class WeightSpec(msgspec.Struct, frozen=True):
    """One weight. `shape` is the logical one: FP4 experts store half as many bytes in the last dimension.

    `fp8`: `NAME.weight` e4m3 and `NAME.scale` ue8m0 in blocks; `fp4`: `NAME.weight` int8 pairs and `NAME.scale` ue8m0
    for 32 inputs each; `table`: `NAME.weight` e4m3 rows and `NAME.scale` ue8m0 for 32 values each; others: one tensor
    of the full name.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True):
    """One stored tensor: its safetensors type name and its stored shape."""

    name: str
    dtype: Literal["F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I64"]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        size = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}[self.dtype]
        for length in self.shape:
            size *= length
        return size


def stored_tensors(spec: WeightSpec, block: int) -> list[TensorSpec]:
    """The tensors that a weight becomes in a checkpoint."""
    shape = spec.shape
    if spec.kind == "fp8":
        scales = (-(-shape[0] // block), -(-shape[1] // block))
        return [
            TensorSpec(f"{spec.name}.weight", "F8_E4M3", shape),
            TensorSpec(f"{spec.name}.scale", "F8_E8M0", scales),
        ]
    if spec.kind == "fp4":
        return [
            TensorSpec(f"{spec.name}.weight", "I8", (shape[0], shape[1] // 2)),
            TensorSpec(f"{spec.name}.scale", "F8_E8M0", (shape[0], shape[1] // 32)),
        ]
    if spec.kind == "table":
        return [
            TensorSpec(f"{spec.name}.weight", "F8_E4M3", shape),
            TensorSpec(f"{spec.name}.scale", "F8_E8M0", (shape[0], shape[1] // 32)),
        ]
    plain: dict[str, Literal["BF16", "F32", "I64"]] = {"bf16": "BF16", "fp32": "F32", "int64": "I64"}
    return [TensorSpec(spec.name, plain[spec.kind], shape)]


def weight_specs(config: DeepseekConfig) -> Iterator[WeightSpec]:
    """All weights of the text model and its draft, layer after layer."""
    hidden = config.hidden_size
    yield WeightSpec("embed.weight", "bf16", (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, f"layers.{layer}", layer)
    yield WeightSpec("norm.weight", "bf16", (hidden,))
    if not config.v41:
        yield from _hyper_connection("hc_head", config.hc_mult, config.hc_mult * hidden, 1)
    yield WeightSpec("head.weight", "bf16", (config.vocab_size, hidden))
    if config.has_draft:
        yield from _draft(config)


def _layer(config: DeepseekConfig, name: str, layer: int) -> Iterator[WeightSpec]:
    if layer in config.engram_layer_ids:
        yield from _engram(config, f"{name}.engram", layer)
    yield from _common(config, name)
    if config.is_kv_source(layer):
        yield from _compressor(config, f"{name}.attn", layer)
    if config.is_index_source(layer):
        heads, dim = config.index_n_heads, config.index_head_dim
        yield WeightSpec(f"{name}.attn.indexer.wq_b", "fp8", (heads * dim, config.q_lora_rank))
        yield WeightSpec(f"{name}.attn.indexer.weights_proj.weight", "bf16", (heads, config.hidden_size))
    yield from _moe(config, f"{name}.ffn", config.n_routed_experts, layer)


def _common(config: DeepseekConfig, name: str) -> Iterator[WeightSpec]:
    """Norms, hyper-connections and attention, which backbone and draft layers share."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    mixes = config.hc_mult * (2 + config.hc_mult)
    for kind in ("attn", "ffn"):
        yield WeightSpec(f"{name}.{kind}_norm.weight", "bf16", (hidden,))
        yield from _hyper_connection(f"{name}.hc_{kind}", mixes, config.hc_mult * hidden, 3)
    attn = f"{name}.attn"
    yield WeightSpec(f"{attn}.wq_a", "fp8", (config.q_lora_rank, hidden))
    yield WeightSpec(f"{attn}.q_norm.weight", "bf16", (config.q_lora_rank,))
    yield WeightSpec(f"{attn}.wq_b", "fp8", (heads * dim, config.q_lora_rank))
    yield WeightSpec(f"{attn}.wkv", "fp8", (dim, hidden))
    yield WeightSpec(f"{attn}.kv_norm.weight", "bf16", (dim,))
    groups = config.o_groups
    yield WeightSpec(f"{attn}.wo_a", "fp8", (groups * config.o_lora_rank, heads // groups * dim))
    yield WeightSpec(f"{attn}.wo_b", "fp8", (hidden, groups * config.o_lora_rank))
    yield WeightSpec(f"{attn}.attn_sink", "fp32", (heads,))


def _hyper_connection(name: str, mixes: int, width: int, scales: int) -> Iterator[WeightSpec]:
    yield WeightSpec(f"{name}_fn", "fp32", (mixes, width))
    yield WeightSpec(f"{name}_base", "fp32", (mixes,))
    yield WeightSpec(f"{name}_scale", "fp32", (scales,))


def _compressor(config: DeepseekConfig, attn: str, layer: int) -> Iterator[WeightSpec]:
    ratio = config.compress_ratios[layer]
    if config.v41:
        yield WeightSpec(f"{attn}.compressor.wkv.weight", "bf16", (config.head_dim, config.hidden_size))
        if ratio > 1:
            yield WeightSpec(f"{attn}.compressor.wgate.weight", "bf16", (config.head_dim, config.hidden_size))
        yield WeightSpec(f"{attn}.compressor.norm.weight", "bf16", (config.head_dim,))
        yield WeightSpec(f"{attn}.indexer.wk.weight", "bf16", (config.index_head_dim, config.head_dim))
        yield WeightSpec(f"{attn}.indexer.k_norm.weight", "bf16", (config.index_head_dim,))
        return
    parts = [(f"{attn}.compressor", config.head_dim)]
    if config.has_index_keys(layer):
        parts.append((f"{attn}.indexer.compressor", config.index_head_dim))
    for name, dim in parts:
        width = 2 * dim if ratio == 4 else dim
        yield WeightSpec(f"{name}.wkv.weight", "bf16", (width, config.hidden_size))
        yield WeightSpec(f"{name}.wgate.weight", "bf16", (width, config.hidden_size))
        yield WeightSpec(f"{name}.ape", "fp32", (ratio, width))
        yield WeightSpec(f"{name}.norm.weight", "bf16", (dim,))


def _moe(config: DeepseekConfig, ffn: str, experts: int, layer: int) -> Iterator[WeightSpec]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield WeightSpec(f"{ffn}.gate.weight", "bf16", (experts, hidden))
    if 0 <= layer < config.num_hash_layers:
        yield WeightSpec(f"{ffn}.gate.tid2eid", "int64", (config.vocab_size, config.num_experts_per_tok))
    else:
        yield WeightSpec(f"{ffn}.gate.bias", "fp32", (experts,))
        if config.v41:
            yield WeightSpec(f"{ffn}.gate.bias_vl", "fp32", (experts,))
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for matrix, shape in shapes.items():
        yield WeightSpec(f"{ffn}.shared_experts.{matrix}", "fp8", shape)
    kind: Kind = config.expert_dtype
    for expert in range(experts):
        for matrix, shape in shapes.items():
            yield WeightSpec(f"{ffn}.experts.{expert}.{matrix}", kind, shape)


def _engram(config: DeepseekConfig, name: str, layer: int) -> Iterator[WeightSpec]:
    hidden, streams = config.hidden_size, config.hc_mult
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    yield WeightSpec(f"{name}.embed", "table", (rows, config.engram_head_dim))
    width = config.engram_columns * config.engram_head_dim
    yield WeightSpec(f"{name}.wkv", "fp8", ((streams + 1) * hidden, width))
    yield WeightSpec(f"{name}.q_weight", "bf16", (streams, hidden))
    yield WeightSpec(f"{name}.k_weight", "bf16", (streams, hidden))


def _draft(config: DeepseekConfig) -> Iterator[WeightSpec]:
    hidden, rank, last = config.hidden_size, config.dspark_markov_rank, config.num_nextn_predict_layers - 1
    yield WeightSpec("mtp.0.main_proj", "fp8", (hidden, len(config.dspark_target_layer_ids) * hidden))
    yield WeightSpec("mtp.0.main_norm.weight", "bf16", (hidden,))
    for index in range(config.num_nextn_predict_layers):
        yield from _common(config, f"mtp.{index}")
        yield from _moe(config, f"mtp.{index}.ffn", config.dspark_n_routed_experts, -1)
    yield WeightSpec(f"mtp.{last}.norm.weight", "bf16", (hidden,))
    yield WeightSpec(f"mtp.{last}.markov_head.embed.weight", "bf16", (config.vocab_size, rank))
    yield WeightSpec(f"mtp.{last}.markov_head.head.weight", "bf16", (config.vocab_size, rank))
    yield WeightSpec(f"mtp.{last}.confidence_head.proj.weight", "fp32", (1, hidden + rank))
