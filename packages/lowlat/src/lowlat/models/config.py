"""The configuration of a decoder model, read from a Hugging Face style config.json."""

from __future__ import annotations

from typing import Any

import msgspec


class UnsupportedModelError(Exception):
    """The checkpoint asks for something that lowlat does not implement; the text names it."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of a decoder. Names are config.json's, except where documented."""

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
    attention_bias: bool
    mlp_bias: bool
    activation: str
    """`hidden_act` or `hidden_activation`: a key of `ACTIVATIONS`."""
    windows: tuple[int, ...]
    """Tokens that each layer's rows see, their own included; 0: all."""
    window_rope_theta: float | None = None
    """Base of the frequencies in layers with a window, where it differs; those are never scaled then."""


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def read_config(config: dict[str, Any], *, rope_theta: float = 10000.0) -> DecoderConfig:
    """Read and check a config.json; `rope_theta` is the family's default.

    Raises:
        UnsupportedModelError: a field is missing, out of range, or asks for something not implemented.
    """
    architectures = config.get("architectures") or ["(none)"]
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModelError(f"config.json: rope_parameters must be an object, not {rope!r}")
    window_theta = config.get("rope_local_base_freq")
    if "full_attention" in rope or "sliding_attention" in rope:
        window_theta = _unscaled_theta(rope.get("sliding_attention") or {}, window_theta)
        rope = rope.get("full_attention") or {}
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
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "attention_bias": config.get("attention_bias") or False,
        "mlp_bias": config.get("mlp_bias") or False,
        "activation": config.get("hidden_activation") or config.get("hidden_act") or "silu",
        "windows": _windows(config),
        "window_rope_theta": window_theta,
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
    if result.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(f"config.json: hidden_act {result.activation!r} is not supported; known: {known}")
    if min(result.windows, default=0) < 0 or len(result.windows) != result.num_hidden_layers:
        raise UnsupportedModelError(
            f"config.json: sliding_window {config.get('sliding_window')!r} and layer_types for {len(result.windows)} "
            f"layers do not describe the attention of {result.num_hidden_layers} layers"
        )
    for name in ("partial_rotary_factor", "attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name) and not (name == "partial_rotary_factor" and config[name] == 1):
            raise UnsupportedModelError(f"config.json: {name} {config[name]!r} is not supported")


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    """The window of every layer. `layer_types` says which layers have one; without it all do, unless
    `use_sliding_window` says no, or only those from `max_window_layers` on where that is given."""
    layers, window = config.get("num_hidden_layers"), config.get("sliding_window")
    if not isinstance(layers, int):
        return ()
    if window is None or config.get("use_sliding_window") is False:
        return (0,) * layers
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UnsupportedModelError(f"config.json: layer_types must be a list of names, not {kinds!r}")
    if kinds is None:
        return tuple(window if index >= config.get("max_window_layers", 0) else 0 for index in range(layers))
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"config.json: layer_types has {unknown[0]!r}, which is not supported")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _unscaled_theta(rope: dict[str, Any], default: float | None) -> float:
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(f"config.json: rope_type {rope['rope_type']!r} of windows is not supported")
    return float(rope.get("rope_theta") or default or 10000.0)


def count(config: dict[str, Any], *names: str) -> int:
    """A whole number of at least 1, by the first of its names that config.json has. Raises `UnsupportedModelError`."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {names[0]} must be a whole number of at least 1, not {value!r}")
    return value
