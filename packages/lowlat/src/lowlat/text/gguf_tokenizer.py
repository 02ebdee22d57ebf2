"""Tokenizers from the metadata of GGUF files, rebuilt in the form of a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.tokenizer import Tokenizer, TokenizerError

# Types of tokens in GGUF files.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _split_then_bytes(pattern: str) -> list[dict[str, Any]]:
    return [_split(pattern), _byte_level(use_regex=False)]


# The patterns are facts about the models' training; the names are those that GGUF files use. A byte-level step with
# use_regex splits words the way GPT-2 does.
_GPT2 = [_byte_level(use_regex=True)]
_DIGITS_GPT2 = [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _split_then_bytes(_WORDS % r"\p{N}{1,3}")
_QWEN2 = _split_then_bytes(_WORDS % r"\p{N}")
_DEFAULT = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _byte_level(use_regex=False),
]

_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2, "gpt2": _GPT2, "olmo": _GPT2, "mpt": _GPT2, "phi-2": _GPT2, "jina-en": _GPT2,
    "smollm": _DIGITS_GPT2, "starcoder": _DIGITS_GPT2, "refact": _DIGITS_GPT2, "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2, "exaone": _DIGITS_GPT2, "minerva-7b": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "stablelm2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        TokenizerError: no tokenizer, a kind or pre-tokenizer that is not known (the message lists the known ones), or
            damaged metadata.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model is None or not isinstance(tokens, list) or not tokens:
        raise TokenizerError("it holds no tokenizer (metadata tokenizer.ggml.model and tokenizer.ggml.tokens)")
    build = _MODELS.get(model) if isinstance(model, str) else None
    if build is None:
        raise TokenizerError(
            f"its tokenizer is of the kind {model!r}; known in GGUF files are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE). Use the model's Hugging Face folder, which holds a tokenizer.json"
        )
    if not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != len(tokens):
        raise TokenizerError("its vocabulary is damaged: a token is there twice or is not text")
    data = build(metadata, tokens) | {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _frame(metadata, tokens),
    }
    ends = [_token_id(metadata, key, len(tokens)) for key in _END_TOKENS]
    tokenizer = Tokenizer.from_json(
        json.dumps(data, ensure_ascii=False),
        bos_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens)),
        eos_ids=[i for i in ends if i is not None],
    )
    tokenizer.special_tokens = special_tokens_of(metadata)
    return tokenizer


def special_tokens_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`, as chat templates see them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    steps = _PRE_TOKENIZERS.get(name)
    if steps is None:
        raise TokenizerError(
            f"its pre-tokenizer is {name!r}, which is not known; known are {', '.join(sorted(_PRE_TOKENIZERS))}. "
            "Use the model's Hugging Face folder, which holds a tokenizer.json"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise TokenizerError("its merges are missing (metadata tokenizer.ggml.merges)")
    # A space separates the halves; inside tokens a space is written as another character.
    pairs = [merge.split(" ", 1) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise TokenizerError("a merge of its tokenizer does not have two parts, so it is damaged")
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": pairs,
            "ignore_merges": name in _WHOLE_WORDS_FIRST,
        },
    }


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """SentencePiece's BPE knows no merges, only scores of pieces: of two neighbours it joins the best-scored pair."""
    scores, types = _numbers(metadata, "scores", tokens), _numbers(metadata, "token_type", tokens)
    if not scores or not types:
        raise TokenizerError("its scores or token types are missing (metadata tokenizer.ggml.scores, .token_type)")
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    merges: list[tuple[float, int, int]] = []
    for token, i in ids.items():
        if types[i] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[i], left, right))
    merges.sort()
    unknown = _token_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    begin = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [(tokens[left], tokens[right]) for _, left, right in merges],
        },
    }


_MODELS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _numbers(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> list[Any]:
    """A number for each token, or none at all."""
    values = metadata.get(f"tokenizer.ggml.{key}", [])
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list) or len(values) not in (0, len(tokens)):
        raise TokenizerError(f"tokenizer.ggml.{key} is damaged: it does not have one number a token")
    if not all(isinstance(value, int | float) for value in values):
        raise TokenizerError(f"tokenizer.ggml.{key} is damaged: it does not hold numbers")
    return values


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], "special": kind != _USER_DEFINED, **flags}
        for i, kind in enumerate(_numbers(metadata, "token_type", tokens))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and tokens[i]
    ]


def _frame(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """The post-processor that puts BOS before and EOS after a text, where the model wants them."""
    bos = eos = None
    usual = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    if metadata.get("tokenizer.ggml.add_bos_token", usual):
        bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens))
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = _token_id(metadata, "tokenizer.ggml.eos_token_id", len(tokens))
    if bos is None and eos is None:
        return None

    def around(sequence: str, number: int) -> list[dict[str, Any]]:
        part = [{"Sequence": {"id": sequence, "type_id": number}}]
        before = [] if bos is None else [{"SpecialToken": {"id": tokens[bos], "type_id": number}}]
        after = [] if eos is None else [{"SpecialToken": {"id": tokens[eos], "type_id": number}}]
        return [*before, *part, *after]

    used = [i for i in (bos, eos) if i is not None]
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in used},
    }


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise TokenizerError(f"{key} is {value!r}, outside its vocabulary of {vocab_size}")
    return value
