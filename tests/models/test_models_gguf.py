"""GGUF files of several architectures are the models they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from family_kit import VOCABULARY, build, check_one_request, save_random

from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.loading.gguf import GGUFError, GGUFFile
from lowlat.models.loading.gguf_model import GGUFModel

# Names in files, as llama.cpp's converters write them.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_file(path: Path, architecture: str, reference: Any) -> None:
    """A GGUF file of a transformers model, in float32."""
    config = reference.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma = architecture == "gemma3"
    if gemma:
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    if architecture != "qwen2":
        writer.add_key_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope["full_attention"] if gemma else rope)["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", *(f"t{number}" for number in range(3, VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["a b"])
    stored = reference.state_dict()
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for name, weight in stored.items():
        for old, new in (_NAMES | (_GEMMA_NORMS if gemma else _PLAIN_NORMS)).items():
            name = name.replace(f"{old}.", f"{new}.")
        writer.add_tensor(name, (weight + 1 if gemma and "norm" in name else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "family", "changes"),
    [
        ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "Qwen3", {"head_dim": 16}),
        (
            "gemma3",
            "Gemma3",
            {
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 10,
                "num_hidden_layers": 7,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
        ),
    ],
)
def test_gguf_files_equal_transformers(
    architecture: str, family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOWLAT_CACHE", str(tmp_path / "cache"))
    reference = save_random(tmp_path / "made", family, **changes)
    file = tmp_path / "model.gguf"
    write_file(file, architecture, reference)
    assert open_checkpoint(file).config["architectures"] == [f"{family}ForCausalLM"]
    check_one_request(reference, build(file))


def test_norms_that_are_not_float32_are_refused(tmp_path: Path):
    """Gemma's norms are stored one above their value: rounded ones would lose it."""
    reference = save_random(tmp_path / "made", "Gemma3", head_dim=16, sliding_window=8, num_hidden_layers=1)
    reference.model.norm.weight.data = reference.model.norm.weight.data.to(torch.float16)
    write_file(tmp_path / "model.gguf", "gemma3", reference)
    with pytest.raises(GGUFError, match=r"output_norm\.weight is F16, not F32"):
        list(GGUFModel(GGUFFile(tmp_path / "model.gguf")).read("model.norm.weight"))
