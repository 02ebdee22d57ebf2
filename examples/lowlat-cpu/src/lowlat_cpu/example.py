"""A small Llama in a GGUF file, for `lowlat plugins check lowlat-cpu` and for this library's own tests."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowlat_cpu import gguf
from lowlat_cpu.specs import LLAMA
from lowlat_cpu.weights import LAYER_MATRICES, halves_apart
from lowlat_plugin.conformance import Case

HF_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 150,  # not a multiple of sixteen
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def small_llama(seed: int = 0, folder: Path | None = None, **changes: Any) -> Case:
    """Write the file and give its weights, dequantised, under their Hugging Face names.

    `changes` replace configuration fields. The file lies in `folder`, or in a new one that goes with the process.
    """
    config = CONFIG | changes
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="lowlat-cpu-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"small-{seed}.gguf"
    weights = write_llama(path, config, seed)
    return Case(
        LLAMA,
        config,
        weights,
        isa="any",
        checkpoint=path,
        weight_formats=frozenset({"gguf.q4_1", "gguf.q8_0", "gguf.f32"}),
        tokens_per_request=3,
    )


def write_llama(path: Path, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = {"query": config["num_attention_heads"], "key": config["num_key_value_heads"]}
    width = {name: count * config["head_dim"] for name, count in heads.items()}
    shapes = {
        "query": (width["query"], hidden),
        "key": (width["key"], hidden),
        "value": (width["key"], hidden),
        "output": (hidden, width["query"]),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
    named: dict[str, torch.Tensor] = {}

    def matrix(file_name: str, hf_name: str, kind: int, shape: tuple[int, int], rotary: int | None = None) -> None:
        raw = random_blocks(random, kind, shape)
        tensors[file_name] = (kind, shape, raw.tobytes())
        values = gguf.dequantise(raw, kind, shape)
        named[hf_name] = torch.from_numpy(values if rotary is None else values[halves_apart(shape[0], rotary)])

    def vector(file_name: str, hf_name: str) -> None:
        values = (1 + 0.2 * random.standard_normal(hidden)).astype(np.float32)
        tensors[file_name] = (gguf.F32, (hidden,), values.tobytes())
        named[hf_name] = torch.from_numpy(values)

    matrix("token_embd.weight", "model.embed_tokens.weight", gguf.Q8_0, (config["vocab_size"], hidden))
    vector("output_norm.weight", "model.norm.weight")
    if not config["tie_word_embeddings"]:
        matrix("output.weight", "lm_head.weight", gguf.Q4_1, (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        vector(block + "attn_norm.weight", prefix + "input_layernorm.weight")
        vector(block + "ffn_norm.weight", prefix + "post_attention_layernorm.weight")
        for field, file_name in LAYER_MATRICES.items():
            kind = gguf.Q8_0 if field == "value" else gguf.Q4_1
            name = f"{prefix}{HF_NAMES[field]}.weight"
            matrix(f"{block}{file_name}.weight", name, kind, shapes[field], heads.get(field))
    gguf.write(path, _metadata(config), tensors)
    return named


def random_blocks(random: np.random.Generator, kind: int, shape: tuple[int, int]) -> np.ndarray:
    """Random bits with scales that give weights of a sensible size, about one over the root of the columns."""
    count = shape[0] * shape[1] // gguf.BLOCK
    blocks = random.integers(0, 256, (count, gguf.BLOCK_BYTES[kind]), dtype=np.uint8)
    size = shape[1] ** -0.5 * random.uniform(0.5, 1.5, (count, 1))
    scale = (size / (73 if kind == gguf.Q8_0 else 4.6)).astype(np.float16)
    blocks[:, :2] = scale.view(np.uint8)
    if kind == gguf.Q4_1:
        blocks[:, 2:4] = (-7.5 * scale.astype(np.float32)).astype(np.float16).view(np.uint8)
    return blocks.reshape(-1)


def _metadata(config: dict[str, Any]) -> dict[str, str | int | float]:
    return {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.rope.freq_base": float(config["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
