"""A tokenizer for tests whose models have a few random tokens."""

from __future__ import annotations

import tokenizers


def byte_tokenizer(size: int) -> str:
    """A tokenizer.json of `size` single bytes."""
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return str(tokenizer.to_str())
