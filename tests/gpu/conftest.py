"""These tests need an NVIDIA GPU (`make test-gpu`). They share the cases of the tests that need none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

from tiny_tokenizer import byte_tokenizer

for folder in ("kernels", "models", "speculative"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with QK-norm and four key-value heads."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=101,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(101))
    return path
