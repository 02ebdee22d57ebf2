"""The configuration of DeepSeek-V4 and V4.1 text models, read from config.json."""

from __future__ import annotations

import bisect
from typing import Any, Literal

import msgspec

from lowlat.models.config import UnsupportedModelError


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Context extension of the compressed layers' rotary positions."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1


class DeepseekConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants. Names are config.json's; `v41` tells the generations apart."""

    v41: bool
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    num_hash_layers: int = 0
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: YarnScaling | None = None
    max_position_embeddings: int = 1048576
    expert_dtype: Literal["fp4", "fp8"] = "fp4"
    weight_block: int = 128
    tie_word_embeddings: bool = False
    image_token_id: int | None = None

    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8

    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 0
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 2

    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    @property
    def activation_group(self) -> int:
        """Values that share a scale in FP8 activations: 32 (V4.1) or 128 (V4)."""
        return 32 if self.v41 else 128

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint carries DSpark layers."""
        return bool(self.dspark_target_layer_ids) and self.num_nextn_predict_layers > 0

    @property
    def engram_columns(self) -> int:
        """Table columns that a token looks up in one Engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries `layer` attends to."""
        return _nearest(self.kv_source_layer_ids, layer) if self.v41 else layer

    def index_source(self, layer: int) -> int:
        """The layer whose selection `layer` uses."""
        return _nearest(self.index_source_layer_ids, layer) if self.v41 else layer

    def has_index_keys(self, layer: int) -> bool:
        """Whether the layer writes index keys."""
        return layer in self.kv_source_layer_ids if self.v41 else self.compress_ratios[layer] == 4

    def is_kv_source(self, layer: int) -> bool:
        """Whether the layer writes compressed entries."""
        return layer in self.kv_source_layer_ids if self.v41 else self.compress_ratios[layer] > 0

    def is_index_source(self, layer: int) -> bool:
        """Whether the layer selects entries."""
        return layer in self.index_source_layer_ids if self.v41 else self.compress_ratios[layer] == 4


def _nearest(sources: tuple[int, ...], layer: int) -> int:
    return sources[bisect.bisect_right(sources, layer) - 1]


def read_deepseek_config(config: dict[str, Any]) -> DeepseekConfig:
    """Read and check a config.json; V4.1 nests the text part under `text_config`.

    Raises:
        UnsupportedModelError: a field is missing, out of range or inconsistent; the text names it.
    """
    text = {**config, **(config.get("text_config") or {})}
    kind = str(config.get("model_type", ""))
    v41 = kind.startswith("deepseek_v41") or any("V41" in name for name in config.get("architectures") or [])
    quantisation = config.get("quantization_config") or text.get("quantization_config") or {}
    block = quantisation.get("weight_block_size") or [32 if v41 else 128]
    fields = {name: text[name] for name in DeepseekConfig.__struct_fields__ if text.get(name) is not None}
    fields |= {"v41": v41, "weight_block": block[0]}
    scaling = fields.get("rope_scaling")
    if scaling is not None and scaling.get("rope_type", scaling.get("type", "yarn")) != "yarn":
        raise UnsupportedModelError(f"config.json: rope_scaling {scaling!r} is not supported; known: yarn")
    try:
        result = msgspec.convert(fields, DeepseekConfig)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(f"config.json: {error}") from error
    _check(result)
    return result


def _check(config: DeepseekConfig) -> None:
    layers = config.num_hidden_layers
    _require(len(config.compress_ratios) >= layers, f"compress_ratios has fewer than {layers} entries")
    _require(config.num_attention_heads % config.o_groups == 0, "o_groups must divide num_attention_heads")
    _require(config.qk_rope_head_dim <= min(config.head_dim, config.index_head_dim), "qk_rope_head_dim is too large")
    _require(config.n_shared_experts == 1, "n_shared_experts must be 1")
    for name in ("hidden_size", "vocab_size", "sliding_window", "q_lora_rank", "num_experts_per_tok", "hc_mult"):
        _require(getattr(config, name) >= 1, f"{name} must be at least 1")
    if config.v41:
        _check_v41(config)


def _check_v41(config: DeepseekConfig) -> None:
    ratios = config.compress_ratios
    compressed = [layer for layer in range(config.num_hidden_layers) if ratios[layer]]
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(config, name)
        _require(list(ids) == sorted(set(ids)), f"{name} must rise")
        _require(not compressed or (bool(ids) and ids[0] == compressed[0]), f"{name} must begin at {compressed[:1]}")
    for layer in compressed:
        _require(ratios[layer] in (1, 2), f"compress_ratios: {ratios[layer]} is not supported; known: 0, 1, 2")
        source = config.kv_source(layer)
        _require(ratios[source] == ratios[layer], f"layer {layer} and its KV source {source} differ in ratio")
    _require(set(config.kv_source_layer_ids) <= set(config.index_source_layer_ids), "a KV source must select entries")
    if config.candidate_source_layer_id >= 0:
        covered = config.candidate_topk_blocks * config.candidate_block_size
        _require(covered >= config.index_topk, "candidate blocks hold fewer entries than index_topk")
        _require(
            config.candidate_source_layer_id in config.kv_source_layer_ids
            and ratios[config.candidate_source_layer_id] == 1,
            "candidate_source_layer_id must be a KV source of ratio 1",
        )
    _require(
        len(config.engram_layer_ids) == len(config.engram_num_embeddings),
        "engram_layer_ids and engram_num_embeddings differ in length",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UnsupportedModelError(f"config.json: {message}")
