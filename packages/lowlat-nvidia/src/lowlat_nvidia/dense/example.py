"""A small Qwen3 that the dense step covers, for `lowlat plugins check` on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import torch

from lowlat_nvidia.specs import DENSE
from lowlat_plugin.conformance import Case

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1501,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def small_qwen3(seed: int = 0, device: str = "cuda") -> Case:
    """Random weights of unit gain, bfloat16. Raises RuntimeError where there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("these kernels are checked on a Hopper GPU, and PyTorch sees no GPU here")
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale + mean).to(device, torch.bfloat16)

    hidden, inner, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    wide, narrow = CONFIG["num_attention_heads"] * dim, CONFIG["num_key_value_heads"] * dim
    sizes = {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "self_attn.q_norm": dim}
    norms["self_attn.k_norm"] = dim
    weights = {
        "model.embed_tokens.weight": draw(CONFIG["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": draw(hidden, scale=0.1, mean=1.0),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, size in sizes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw(*size, scale=size[1] ** -0.5)
        for name, length in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw(length, scale=0.1, mean=1.0)
    return Case(
        DENSE, CONFIG, weights, isa="sm_90", device=device, dtype="bfloat16", page_size=16, tokens_per_request=4
    )  # fmt: skip
