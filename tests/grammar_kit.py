"""Tiny random models whose tokenizers can write any text, and checks of what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

EOS, OTHER_EOS = 300, 301
VOCABULARY = 320
"""Of the model: more than the tokenizers have."""
_WORDS = ["true", "false", "null", '{"', '":', '",', "yes", "no", "maybe", " a", "ab", "12"]


def byte_level() -> str:
    """Every byte, some longer tokens, and control tokens."""
    from lowlat.text.token_bytes import byte_of_character

    characters = {byte: character for character, byte in byte_of_character().items()}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    return _finish(vocabulary, lambda word: "".join(characters[byte] for byte in word.encode()), False)


def sentencepiece() -> str:
    """The same, with bytes written as <0x41> and spaces as a mark."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    return _finish(vocabulary, lambda word: word.replace(" ", "▁"), True)


def _finish(vocabulary: dict[str, int], write: Any, byte_fallback: bool) -> str:
    merges = []
    for word in _WORDS:
        for end in range(2 if not byte_fallback else 1, len(word) + 1):
            piece = write(word[:end])
            if piece not in vocabulary and len(vocabulary) < EOS:
                vocabulary[piece] = len(vocabulary)
                if end > 1:
                    merges.append((write(word[: end - 1]), write(word[end - 1])))
    if byte_fallback:
        merges = []
    library = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=byte_fallback))
    if byte_fallback:
        library.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    filler = [f"<unused{n}>" for n in range(len(vocabulary), EOS)]
    library.add_special_tokens([*filler, "<eos>", "<turn>"])
    assert library.token_to_id("<eos>") == EOS
    assert library.token_to_id("<turn>") == OTHER_EOS
    return str(library.to_str())


def save_tiny(path: Path, tokenizer: str, **changes: Any) -> Path:
    """A random model that says any token with some probability."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 2048,
            "initializer_range": 0.3,
            "eos_token_id": [EOS, OTHER_EOS],
            "bos_token_id": None,
            "pad_token_id": None,
        }
        | changes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer)
    return path


SETTINGS: dict[str, Any] = {
    "threads": 1,
    "kv_tokens": 8192,
    "chunk_tokens": 16,
    "page_size": 4,
    "max_batch": 8,
    "dtype": "float32",
    "low_latency": "off",
    "seed": 1,
}
