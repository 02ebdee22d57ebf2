"""Tokenizers: exact bytes, decoding as the library does, the frame added once, and rebuilding from JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.tokenizer import Tokenizer, TokenizerError

ORACLE = Path(__file__).parents[1] / "data" / "smollm2_135m_instruct_fp32_greedy.json"
ids_of_smollm2 = st.lists(st.integers(0, 49_151), max_size=30)


def test_prompts_and_answers_of_the_oracle(smollm2: Tokenizer) -> None:
    cases = json.loads(ORACLE.read_text(encoding="utf-8"))["cases"]
    texts = [case for case in cases if isinstance(case["prompt"], str)]
    assert len(texts) == 3
    for case in texts:
        assert smollm2.encode(case["prompt"]) == case["input_ids"]
    for case in cases:
        assert smollm2.decode(case["output_ids"], skip_special_tokens=False) == case["text"]


@given(ids=ids_of_smollm2, skip=st.booleans())
@settings(max_examples=200)
def test_decode_equals_the_library_for_any_ids(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    assert smollm2.decode(ids, skip) == smollm2._library.decode(ids, skip_special_tokens=skip)


@given(data=st.binary(max_size=40))
@settings(max_examples=300)
def test_decode_of_malformed_utf8_equals_the_library(byte_tokenizer: Tokenizer, data: bytes) -> None:
    ids = list(data)
    assert b"".join(byte_tokenizer.token_bytes(i) for i in ids) == data
    assert byte_tokenizer.decode(ids) == byte_tokenizer._library.decode(ids)


# Its vocabulary lacks bytes that only rare scripts beyond U+40000 and control characters need; they are dropped.
known = st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"], max_codepoint=0x1FFFF)


@given(text=st.text(known, max_size=60))
@settings(max_examples=200)
def test_text_survives_encoding(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_every_token_has_bytes(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert all(smollm2.token_bytes(i) for i in range(smollm2.vocab_size))
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(smollm2.vocab_size + 5) == b"" == smollm2.token_bytes(-1)


def test_token_text_of_half_a_character(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_text(ord("a")) == "a"
    assert byte_tokenizer.token_text(0xE4) == "bytes:\\xe4"


def test_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_ids) == (1, (2,))
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "hi"


def test_json_round_trip(smollm2: Tokenizer) -> None:
    twin = Tokenizer.from_json(smollm2.to_json(), bos_id=smollm2.bos_id, eos_ids=smollm2.eos_ids)
    text = "Numbers 12345, 世界 and 👋🏽 <|im_end|>"
    assert twin.encode(text) == smollm2.encode(text)
    assert twin.special_ids == smollm2.special_ids


def test_lone_surrogates_are_replaced(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a\ufffdb"
    assert smollm2.decode(smollm2.encode("\ud83d\ude00")) == "😀"


def with_frame(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, putting `<|start|>` before every text."""
    data = json.loads(tokenizer.to_json())
    part = [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    names = {"<|start|>": {"id": "<|start|>", "ids": [257], "tokens": ["<|start|>"]}}
    data["post_processor"] = {"type": "TemplateProcessing", "single": part, "pair": part, "special_tokens": names}
    data["post_processor"]["pair"] = [*part, {"Sequence": {"id": "B", "type_id": 1}}]
    return Tokenizer.from_json(json.dumps(data), bos_id=257)


def test_bos_is_added_once(byte_tokenizer: Tokenizer) -> None:
    framed = with_frame(byte_tokenizer)
    assert framed.encode("ab") == [257, 97, 98]
    assert framed.encode("<|start|>ab") == [257, 97, 98]
    assert framed.encode("<|start|>ab", add_special_tokens=False) == [257, 97, 98]
    assert framed.encode("ab", add_special_tokens=False) == [97, 98]
    assert framed.encode("") == [257]
    assert byte_tokenizer.encode("") == []


def test_folder(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer.to_json(), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).eos_ids == ()
    settings_ = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    loaded = Tokenizer.from_folder(tmp_path)
    assert (loaded.bos_id, loaded.eos_ids) == (257, (256,))
    assert loaded.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 9, 256]}')
    assert Tokenizer.from_folder(tmp_path).eos_ids == (256, 9)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a readable"):
        Tokenizer.from_folder(tmp_path)
