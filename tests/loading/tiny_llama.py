"""Small GGUF files, written by the `gguf` package, and their Hugging Face twins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghij", "ab", "Ġa", "Ġ", "Ċ", *"0123456789"]


@dataclasses.dataclass
class TinyLlama:
    """Dimensions of a random llama; `weights` are float32 in the Hugging Face layout, filled by `write`."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 96
    tied: bool = True
    bias: bool = False
    matrix_type: str = "F32"
    vocab: int = len(TOKENS)
    rope_factors: np.ndarray[Any, Any] | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    version: int = 3

    def shapes(self) -> dict[str, tuple[int, ...]]:
        h, i, kv = self.hidden, self.intermediate, self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h), "model.norm.weight": (h,)}
        for n in range(self.layers):
            layer = f"model.layers.{n}"
            shapes |= {f"{layer}.input_layernorm.weight": (h,), f"{layer}.post_attention_layernorm.weight": (h,)}
            shapes |= {f"{layer}.self_attn.{p}_proj.weight": (kv if p in "kv" else h, h) for p in "qkvo"}
            shapes |= {f"{layer}.mlp.{p}_proj.weight": (i, h) for p in ("gate", "up")}
            shapes |= {f"{layer}.mlp.down_proj.weight": (h, i)}
            if self.bias:
                shapes |= {f"{layer}.self_attn.{p}_proj.bias": (kv if p in "kv" else h,) for p in "qkvo"}
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocab, h)}


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows from halves to neighbouring pairs, as converters to GGUF do for the llama architecture."""
    shape = weight.shape
    halves = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def gguf_name(name: str) -> str:
    for new, old in (
        ("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head"),
        ("blk", "model.layers"), ("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"),
        ("attn_output", "self_attn.o_proj"), ("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"), ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def write(path: Path, model: TinyLlama, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Writes a GGUF file; returns the values it holds (after quantisation) in the Hugging Face layout."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    for key, value in model.metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    values: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in model.shapes().items():
        weight = (random.standard_normal(shape) * 0.1).astype(np.float32)
        heads = {"q_proj": model.heads, "k_proj": model.kv_heads}.get(name.split(".")[-2])
        stored = weight if heads is None else interleave(weight, heads)
        kind = gguf.GGMLQuantizationType[model.matrix_type if weight.ndim == 2 else "F32"]
        blocks = gguf.quantize(stored, kind)
        writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
        # Quantisation works along rows, so it commutes with their order.
        values[name] = gguf.dequantize(gguf.quantize(weight, kind), kind).reshape(shape)
    if model.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", model.rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values
