"""Ready configurations for random checkpoints: the published sizes and tiny ones of the same structure."""

from __future__ import annotations

from typing import Any

_TINY: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_TINY_V41: dict[str, Any] = _TINY | {
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-20,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_topk": 8,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 2],
    "engram_num_embeddings": [2914, 3746],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_vocab_size": 211,
    "engram_compressed_vocab_size": 200,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 199,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 1,
    "image_token_id": 198,
    "pad_token_id": 2,
}

_TINY_V4: dict[str, Any] = _TINY | {
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 0, 4, 16, 4, 0],
    "index_topk": 4,
    "num_hash_layers": 2,
}

_FLASH: dict[str, Any] = _TINY | {
    "vocab_size": 129280,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_scaling": _TINY["rope_scaling"] | {"original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
}

_V41_FLASH: dict[str, Any] = (
    _TINY_V41
    | _FLASH
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "q_lora_rank": 1280,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 16_000_000,
        "engram_compressed_vocab_size": 99092,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "image_token_id": 129264,
    }
)

_V4_FLASH: dict[str, Any] = _FLASH | {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "q_lora_rank": 1024,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    "index_n_heads": 64,
    "num_hash_layers": 3,
}

_TEXT: dict[str, dict[str, Any]] = {
    "tiny-v41": _TINY_V41,
    "tiny-v4": _TINY_V4,
    "v41-flash": _V41_FLASH,
    "v4-flash": _V4_FLASH,
}


def preset_names() -> list[str]:
    """Known presets, sorted."""
    return sorted(_TEXT)


def preset(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a preset, with fields of the text part replaced.

    Raises:
        KeyError: no such preset.
    """
    text = _TEXT[name] | changes
    v41 = name.endswith("v41") or name.startswith("v41")
    quantisation = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32] if v41 else [128, 128],
    }
    text = text | {"expert_dtype": "fp4"}
    if not v41:
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **text,
            "quantization_config": quantisation,
        }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "max_position_embeddings": text["max_position_embeddings"],
        "text_config": {"model_type": "deepseek_v41_text", **text},
        "quantization_config": quantisation,
    }
