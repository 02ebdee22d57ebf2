"""Tokenizers for the tests of text: small ones made here, and the embedded model's own."""

from __future__ import annotations

import json

import pytest

from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.gguf import GGUFFile
from lowlat.models.loading.registry import embedded_path
from lowlat.text.gguf_tokenizer import tokenizer_from_gguf
from lowlat.text.token_bytes import byte_of_character
from lowlat.text.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|start|>"]


def _added(i: int, content: str, special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": special, **flags}


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """One token a byte, in the order of bytes; then `<|end|>` (256), `<|start|>` (257) and the tag `<tool>` (258)."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    vocabulary = {characters[byte]: byte for byte in range(256)}
    vocabulary |= {"<|end|>": 256, "<|start|>": 257, "<tool>": 258}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data = {
        "version": "1.0",
        "added_tokens": [_added(256, "<|end|>", True), _added(257, "<|start|>", True), _added(258, "<tool>", False)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return Tokenizer.from_json(json.dumps(data), eos_ids=[256])


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The embedded model's tokenizer, from the metadata of its file."""
    try:
        path = embedded_path("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    return tokenizer_from_gguf(GGUFFile(path).metadata)


@pytest.fixture(scope="session")
def smollm2_template(smollm2: Tokenizer) -> str:
    return GGUFFile(embedded_path("smollm2")).metadata["tokenizer.chat_template"]
