"""A tokenizer of single bytes for tiny random checkpoints: ASCII and two-byte UTF-8 whole, every id has a text."""

from __future__ import annotations

import json
from pathlib import Path

from lowlat.text.token_bytes import byte_of_character

CONTROL = ("<|begin|>", "<|end|>", "<|pad|>", "<|unknown|>")


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for `vocab_size` ids: control tokens, then bytes, the usual first.

    Ids beyond all bytes have no text. Bytes that have no id become `<|unknown|>`.

    Raises:
        ValueError: too few ids for ASCII.
    """
    ascii_bytes = [10, 9, *range(32, 127)]
    if vocab_size < len(CONTROL) + len(ascii_bytes):
        raise ValueError(f"a tiny tokenizer needs {len(CONTROL) + len(ascii_bytes)} ids, not {vocab_size}")
    two_byte = [*range(0x80, 0xC0), *range(0xC2, 0xE0)]
    order = [*ascii_bytes, *two_byte]
    order += [byte for byte in (0xE2, 0xE3, 0xEF, 0xF0, 0xE4) if byte not in order]
    order += [byte for byte in range(256) if byte not in order]
    character = {byte: text for text, byte in byte_of_character().items()}
    vocabulary = {content: index for index, content in enumerate(CONTROL)}
    for byte in order[: vocab_size - len(CONTROL)]:
        vocabulary[character[byte]] = len(vocabulary)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": index, "content": content, "special": True, **flags} for index, content in enumerate(CONTROL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": CONTROL[3], "fuse_unk": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    settings = {"bos_token": CONTROL[0], "eos_token": CONTROL[1], "pad_token": CONTROL[2]}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
