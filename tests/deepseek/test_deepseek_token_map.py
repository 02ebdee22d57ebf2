"""Engram's token compression on a real tokenizer, against a count made with Python's own Unicode tables."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from deepseek_kit import open_folder
from tokenizers import Tokenizer

from lowlat.models.deepseek_v4.make_checkpoint import make_checkpoint
from lowlat.models.deepseek_v4.presets import preset
from lowlat.models.deepseek_v4.token_map import build_token_map, load_token_map
from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.gguf import GGUFFile
from lowlat.models.loading.registry import embedded_path
from lowlat.text.gguf_tokenizer import tokenizer_from_gguf
from lowlat.text.token_bytes import byte_of_character


def independent_keys(tokenizer: Tokenizer, size: int) -> list[str]:
    """The texts that tokens count as, from the raw vocabulary, with Python's Unicode tables."""
    bytes_of = byte_of_character()
    added = tokenizer.get_added_tokens_decoder()
    keys = []
    for token in range(size):
        piece = tokenizer.id_to_token(token)
        if token in added:
            text = added[token].content
        else:
            text = bytes(bytes_of[character] for character in piece).decode("utf-8", "replace")
        if "\ufffd" in text:
            keys.append(piece)
            continue
        key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        key = "".join(c for c in key if unicodedata.category(c) != "Mn")
        key = "".join(c.lower() for c in key)
        key = re.sub(r"[ \t\r\n]+", " ", key)
        key = " " if key == " " else key.strip()
        keys.append(key or text)
    return keys


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SmolLM2's tokenizer.json."""
    try:
        file = GGUFFile(embedded_path("smollm2"))
    except CheckpointError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "tokenizer.json").write_text(tokenizer_from_gguf(file.metadata).to_json(), encoding="utf-8")
    return folder


def test_the_map_of_smollm2_equals_an_independent_count(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    assert size == 49152
    token_map = build_token_map(tokenizer, size)
    keys = independent_keys(tokenizer, size)
    first_seen: dict[str, int] = {}
    expected = np.array([first_seen.setdefault(key, len(first_seen)) for key in keys])
    differing = np.flatnonzero(token_map != expected)
    assert differing.size == 0, [(int(i), keys[i]) for i in differing[:5]]
    assert token_map.max() + 1 == len(set(keys))
    assert 0.5 * size < len(set(keys)) < 0.95 * size
    same = {tokenizer.token_to_id(piece) for piece in ("hello", "Hello", "Ġhello", "ĠHello")} - {None}
    assert len(same) >= 2
    assert len({int(token_map[token]) for token in same}) == 1
    space, newline, word = (tokenizer.token_to_id(piece) for piece in ("Ġ", "Ċ", "Ġa"))
    assert token_map[space] == token_map[newline] != token_map[word]


def test_a_checkpoint_with_a_tokenizer_counts_by_it(smollm2: Path, tmp_path: Path) -> None:
    config = preset("tiny-v41", vocab_size=49152)
    make_checkpoint(config, tmp_path / "made", tokenizer=smollm2)
    made = open_folder(tmp_path / "made")
    count = made.config["text_config"]["engram_compressed_vocab_size"]
    stored = load_token_map(made.folder, 49152, count)
    (made.folder / "engram_token_map.safetensors").unlink()
    built = load_token_map(made.folder, 49152, count)
    assert stored.tolist() == built.tolist()
    with pytest.raises(CheckpointError, match="does not belong"):
        load_token_map(made.folder, 49152, count + 1)
    (made.folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load_token_map(made.folder, 49152, count)


def test_tiny_checkpoints_have_an_identity_map_and_a_tokenizer(tiny_v41: Path) -> None:
    assert load_token_map(tiny_v41, 200, 200).tolist() == list(range(200))
    checkpoint = open_folder(tiny_v41)
    tokenizer = checkpoint.tokenizer()
    text = "The quick brown fox: 0.1 + 2 = {2.1}\n\tÜber łódź"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.decode(list(range(4, 101))) == "\n\t" + "".join(map(chr, range(32, 127)))
    assert tokenizer.token_bytes(199) != b""
    assert tokenizer.can_stream()
    assert max(ids) < json.loads((tiny_v41 / "config.json").read_text())["text_config"]["vocab_size"]
