"""The configuration of a decoder model, read from a Hugging Face style config.json."""

from __future__ import annotations

from typing import Any

import msgspec


class UnsupportedModelError(Exception):
    """The checkpoint asks for something that lowlat does not implement; the text names it."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of a dense decoder. Names are config.json's."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool


def read_config(config: dict[str, Any]) -> DecoderConfig:
    """Read and check a config.json.

    Raises:
        UnsupportedModelError: a field is missing, out of range, or asks for something not implemented.
    """
    architectures = config.get("architectures") or ["(none)"]
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    heads = config.get("num_attention_heads")
    fields = {
        "architecture": architectures[0],
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "num_hidden_layers": config.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else None),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": scaling,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }
    try:
        result = msgspec.convert(fields, DecoderConfig)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(f"config.json: {error}") from error
    _check(result, config)
    return result


def _check(result: DecoderConfig, config: dict[str, Any]) -> None:
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size"):
        if getattr(result, name) < 1:
            raise UnsupportedModelError(f"config.json: {name} must be at least 1, not {getattr(result, name)}")
    if result.num_attention_heads % result.num_key_value_heads:
        raise UnsupportedModelError(
            f"config.json: {result.num_attention_heads} attention heads do not share "
            f"{result.num_key_value_heads} key-value heads evenly"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; known: silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedModelError(f"config.json: {name} is not supported")
