"""Engram's token compression: tokens whose texts differ in case, accents or spacing only share one id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lowlat.models.loading.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAP_FILE = "engram_token_map.safetensors"
_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"


def build_token_map(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """Compressed id of each token id, int32 [vocab_size], numbered in the order in which texts are first seen.

    Each token is decoded alone. A text with U+FFFD (a piece of a character) counts as its raw vocabulary entry; other
    texts are normalised, and one that normalises to nothing counts as it is. Ids beyond the tokenizer's vocabulary
    count as different empty places: each gets an id of its own.
    """
    from tokenizers import Regex, normalizers

    normaliser = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # Stripping would empty a token that is one space; it is set aside first.
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    ids: dict[str, int] = {}
    result = np.empty(vocab_size, dtype=np.int32)
    for token in range(vocab_size):
        piece = tokenizer.id_to_token(token)
        if piece is None:
            key = f"{_REPLACEMENT}{token}"
        else:
            text = tokenizer.decode([token], skip_special_tokens=False)
            key = piece if _REPLACEMENT in text else normaliser.normalize_str(text) or text
        result[token] = ids.setdefault(key, len(ids))
    return result


def write_token_map(folder: Path, token_map: np.ndarray) -> None:
    """Store a map beside a checkpoint's weights."""
    from safetensors.numpy import save_file

    save_file({"token_map": token_map}, str(folder / MAP_FILE))


def load_token_map(folder: Path, vocab_size: int, compressed: int) -> torch.Tensor:
    """The checkpoint's map, int64 [vocab_size]: its stored one, or one built from its tokenizer.

    Raises:
        CheckpointError: there is neither, or the number of different ids is not `compressed`, which would change
            every hash.
    """
    path, tokenizer_path = folder / MAP_FILE, folder / "tokenizer.json"
    if path.is_file():
        from safetensors.numpy import load_file

        token_map = load_file(str(path)).get("token_map")
        if token_map is None or token_map.shape != (vocab_size,):
            raise CheckpointError(f"{path} does not hold a token_map of {vocab_size} entries")
    elif tokenizer_path.is_file():
        from tokenizers import Tokenizer

        token_map = build_token_map(Tokenizer.from_file(str(tokenizer_path)), vocab_size)
        path = tokenizer_path
    else:
        raise CheckpointError(f"{folder} has neither {MAP_FILE} nor tokenizer.json: Engram needs one of them")
    count = int(token_map.max()) + 1
    if int(token_map.min()) < 0 or count > compressed or (path == tokenizer_path and count != compressed):
        raise CheckpointError(
            f"{path} gives {count} compressed token ids, but config.json says {compressed}: "
            "the tokenizer does not belong to these weights"
        )
    return torch.from_numpy(token_map.astype(np.int64))
