"""The models that `lowlat bench` knows by name, as shapes: what a step computes, whatever the weights are."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import msgspec


class DenseShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder with grouped-query attention and a gated MLP; sizes are config.json's."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    tied: bool = False
    """The LM head is the embedding table. A step reads the head either way."""
    rope_theta: float = 10000.0
    eps: float = 1e-5
    architecture: str = "LlamaForCausalLM"
    max_context: int = 131072

    def config(self) -> dict[str, Any]:
        """The model as a config.json, for arms that build models from one."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


PRESETS: dict[str, DenseShape] = {
    shape.name: shape
    for shape in (
        DenseShape(
            name="llama-1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256,
            tied=True, rope_theta=500000.0,
        ),
        DenseShape(
            name="qwen3-0.6b", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
            vocab=151936, qk_norm=True, tied=True, rope_theta=1000000.0, eps=1e-6, architecture="Qwen3ForCausalLM",
            max_context=40960,
        ),
        DenseShape(
            name="qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288,
            vocab=151936, qk_norm=True, rope_theta=1000000.0, eps=1e-6, architecture="Qwen3ForCausalLM",
            max_context=40960,
        ),
        DenseShape(
            name="smollm2", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152,
            tied=True, rope_theta=100000.0, max_context=8192,
        ),
        DenseShape(
            name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512,
            max_context=4096,
        ),
    )
}  # fmt: skip
"""`tiny` exists so that every command can be tried in a second on any machine."""

DEEPSEEK_V41 = "deepseek-v41"
V41_NAMES = (DEEPSEEK_V41, f"{DEEPSEEK_V41}-tiny")
"""Computed by lowlat's own runner alone: see `random_v41`. The tiny one has all parts of the large one."""

MODEL_NAMES = (*PRESETS, *V41_NAMES)

TITLES = {
    "llama-1b": "Llama-3.2-1B", "qwen3-0.6b": "Qwen3-0.6B", "qwen3-1.7b": "Qwen3-1.7B", "qwen3-8b": "Qwen3-8B",
    "smollm2": "SmolLM2-135M", DEEPSEEK_V41: "DeepSeek-V4.1-Flash",
}  # fmt: skip
"""What readers call the shapes, in the order of tables."""


DENSE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
"""Their step is also written out here, for other arms than lowlat's."""


class FolderShape(msgspec.Struct, frozen=True):
    """What an arm must know of a model that only lowlat's runner computes, from a checkpoint's folder."""

    name: str
    vocab: int
    max_context: int


def _architecture(config: dict[str, Any]) -> str:
    return str((config.get("architectures") or ["?"])[0])


def shape_from_config(config: dict[str, Any], name: str) -> DenseShape:
    """The shape that a config.json describes. Raises ValueError naming the missing field or the architecture."""
    architecture = _architecture(config)
    if architecture not in DENSE_ARCHITECTURES:
        raise ValueError(f"{name}: no step is built here for architecture {architecture}")
    try:
        heads = config["num_attention_heads"]
        return DenseShape(
            name=name,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float((config.get("rope_parameters") or config).get("rope_theta", 10000.0)),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            architecture=architecture,
            max_context=config.get("max_position_embeddings", 2048),
        )
    except KeyError as error:
        raise ValueError(f"{name}: config.json lacks {error}") from error


def folder_name(folder: str) -> str:
    """What results call the model of a folder."""
    return os.path.basename(os.path.abspath(folder))


def folder_config(folder: str) -> dict[str, Any]:
    """The config.json of a folder. Raises ValueError naming the presets where there is none."""
    place = pathlib.Path(folder) / "config.json"
    if not place.is_file():
        known = ", ".join(MODEL_NAMES)
        raise ValueError(f"{folder!r} is neither a preset ({known}) nor a folder with a config.json")
    try:
        config: dict[str, Any] = json.loads(place.read_text())
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return config


def any_shape(model: str, layers: int | None = None) -> DenseShape | FolderShape:
    """As `find_shape`; of a folder of another family what lowlat's runner needs. Raises ValueError for its `layers`."""
    if model in PRESETS or model in V41_NAMES:
        return find_shape(model, layers)
    config = folder_config(model)
    if _architecture(config) in DENSE_ARCHITECTURES:
        return find_shape(model, layers)
    if layers is not None:
        raise ValueError(f"{model}: --layers is for dense models; lowlat bench make-model writes one of fewer layers")
    text = config.get("text_config") or config
    try:
        return FolderShape(folder_name(model), text["vocab_size"], text["max_position_embeddings"])
    except KeyError as error:
        raise ValueError(f"{model}: config.json lacks {error}") from error


def find_shape(model: str, layers: int | None = None) -> DenseShape:
    """The shape of a preset by name or of a folder with a config.json; `layers` keeps only that many.

    Raises ValueError naming the presets, and for DeepSeek-V4.1, which is no dense model.
    """
    if model in V41_NAMES:
        raise ValueError(f"{model} is no dense model")
    shape = PRESETS[model] if model in PRESETS else shape_from_config(folder_config(model), folder_name(model))
    if layers is not None:
        if not 1 <= layers <= shape.layers:
            raise ValueError(f"{shape.name} has {shape.layers} layers, not {layers}")
        shape = msgspec.structs.replace(shape, layers=layers, name=f"{shape.name}-{layers}l")
    return shape
