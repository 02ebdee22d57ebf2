"""A tokenizer of single characters for tiny random checkpoints: no text is lost on ASCII, every id has a text."""

from __future__ import annotations

import json
from pathlib import Path

BEGIN, END, PAD, UNKNOWN = "<|begin|>", "<|end|>", "<|pad|>", "<|unknown|>"
_FIRST_CHARACTER = 4


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab_size` ids: control tokens, then characters.

    Raises:
        ValueError: too few ids for ASCII.
    """
    characters = ["\n", "\t"] + [chr(code) for code in range(32, 127)]
    if vocab_size < _FIRST_CHARACTER + len(characters):
        raise ValueError(f"a tiny tokenizer needs {_FIRST_CHARACTER + len(characters)} ids, not {vocab_size}")
    code = 0xC0
    while len(characters) < vocab_size - _FIRST_CHARACTER:
        if chr(code).isalpha():
            characters.append(chr(code))
        code += 1
    vocabulary = {BEGIN: 0, END: 1, PAD: 2, UNKNOWN: 3}
    vocabulary |= {character: index for index, character in enumerate(characters, start=_FIRST_CHARACTER)}
    added = [
        {
            "id": index,
            "content": content,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for content, index in list(vocabulary.items())[:_FIRST_CHARACTER]
    ]
    data = {
        "version": "1.0",
        "added_tokens": added,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": UNKNOWN, "fuse_unk": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    settings = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
