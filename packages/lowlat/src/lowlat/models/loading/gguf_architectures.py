"""What differs between the architectures of GGUF files: names of tensors, order of rows, and configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B_LAYERS = 62

Count = Callable[[str, int | None], int]
"""(key, default) to a positive whole number of the file's metadata."""


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """One architecture. `file_config` gives further fields of config.json from what the others say."""

    hugging_face: str
    model_type: str
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LAYER_NAMES)
    interleaved: bool = False
    """Rows of queries and keys are stored as neighbouring pairs (see `GGUFWeight.row_order`)."""
    norm_offset: float = 0.0
    """What the file's norm weights are above those of Hugging Face."""
    file_config: Callable[[dict[str, Any], Count], dict[str, Any]] = lambda config, count: {}


def _gemma3(config: dict[str, Any], count: Count) -> dict[str, Any]:
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    # Files do not say the scale of scores: it is that of a head, except in the largest model of the family.
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == _GEMMA_27B_LAYERS else config["head_dim"],
        "sliding_window": count("attention.sliding_window", None),
        "sliding_window_pattern": count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": 10_000.0,
    }


ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", _LAYER_NAMES | _HEAD_NORMS),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _LAYER_NAMES | _HEAD_NORMS | _GEMMA_NORMS,
        norm_offset=1.0,
        file_config=_gemma3,
    ),
}
"""By the name in the metadata `general.architecture`."""
