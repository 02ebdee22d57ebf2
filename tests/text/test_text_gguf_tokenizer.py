"""Tokenizers rebuilt from GGUF metadata: SentencePiece against its own library, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.detokenizer import StreamingDetokenizer
from lowlat.text.gguf_tokenizer import tokenizer_from_gguf
from lowlat.text.tokenizer import Tokenizer, TokenizerError

CORPUS = Path(__file__).read_text(encoding="utf-8") + "Příliš žluťoučký kůň úpěl ďábelské ódy. 世界 社区 🔥\n" * 20


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small SentencePiece BPE model with byte fallback, trained on this file."""
    library = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sentencepiece")
    (path / "corpus.txt").write_text(CORPUS, encoding="utf-8")
    library.SentencePieceTrainer.train(
        input=str(path / "corpus.txt"), model_prefix=str(path / "model"), model_type="bpe", vocab_size=900,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.999, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return library.SentencePieceProcessor(model_file=str(path / "model.model"))


@pytest.fixture(scope="module")
def rebuilt(sentencepiece: Any) -> Tokenizer:
    count = sentencepiece.get_piece_size()

    def kind(i: int) -> int:
        if sentencepiece.is_unknown(i):
            return 2
        if sentencepiece.is_control(i):
            return 3
        return 6 if sentencepiece.is_byte(i) else 1

    return tokenizer_from_gguf({
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sentencepiece.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": np.array([sentencepiece.get_score(i) for i in range(count)], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in range(count)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    })  # fmt: skip


@pytest.mark.parametrize(
    "text", [*filter(None, CORPUS.splitlines()[::7]), "🦊 byte fallback ☃", "  two  spaces ", "a\n\nb\tc", "世"]
)
def test_sentencepiece_ids(sentencepiece: Any, rebuilt: Tokenizer, text: str) -> None:
    assert rebuilt.encode(text, add_special_tokens=False) == sentencepiece.encode(text)
    assert rebuilt.encode(text) == [1, *sentencepiece.encode(text)]
    assert rebuilt.decode(rebuilt.encode(text)) == text


@given(ids=st.lists(st.integers(0, 899), max_size=30), skip=st.booleans())
@settings(max_examples=200)
def test_sentencepiece_streams_what_it_decodes(rebuilt: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = StreamingDetokenizer(rebuilt, skip_special_tokens=skip)
    pieces = [*(detokenizer.push(i) for i in ids), detokenizer.finish()]
    whole = rebuilt.decode(ids, skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert whole == rebuilt._library.decode(ids, skip_special_tokens=skip)


def test_the_space_before_an_answer(rebuilt: Tokenizer) -> None:
    ids = rebuilt.encode("self", add_special_tokens=False)
    for continues, expected in ((False, "self"), (True, " self")):
        detokenizer = StreamingDetokenizer(rebuilt, continues=continues)
        assert "".join(detokenizer.push(i) for i in ids) == expected


def byte_level(**changes: Any) -> dict[str, Any]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["</s>", "<tag>", *"ab12", "ab", "12", "Ġ"],
        "tokenizer.ggml.token_type": np.array([3, 4, 1, 1, 1, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in (metadata | changed).items() if value is not None}


def test_pre_tokenizers_differ_in_digits() -> None:
    assert tokenizer_from_gguf(byte_level()).encode("ab12") == [6, 4, 5]
    for name in ("gpt-2", "default", "llama-bpe"):
        assert tokenizer_from_gguf(byte_level(pre=name)).encode("ab12") == [6, 7]
    assert tokenizer_from_gguf(byte_level(pre="qwen2")).encode("ab12") == [6, 4, 5]
    assert tokenizer_from_gguf(byte_level(pre=None)).encode("ab12") == [6, 7]


def test_kinds_of_tokens() -> None:
    tokenizer = tokenizer_from_gguf(byte_level())
    assert tokenizer.special_ids == {0}
    assert tokenizer.encode("<tag>ab</s>") == [1, 6, 0]
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((0,), None)
    both = tokenizer_from_gguf(byte_level(eot_token_id=1, eom_token_id=0))
    assert both.eos_ids == (0, 1)


def test_frame() -> None:
    framed = byte_level(bos_token_id=1, add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_gguf(framed).encode("ab") == [1, 6, 0]
    # Llama 3 adds BOS unless the file says otherwise.
    assert tokenizer_from_gguf(byte_level(bos_token_id=1, pre="llama-bpe")).encode("ab") == [1, 6]
    plain = byte_level(bos_token_id=1, pre="llama-bpe", add_bos_token=False)
    assert tokenizer_from_gguf(plain).encode("ab") == [6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'bert'; known in GGUF files are gpt2"),
        ({"model": None}, "holds no tokenizer"),
        ({"pre": "mystery"}, "'mystery', which is not known; known are .*llama-bpe.*qwen2.*smollm"),
        ({"merges": None}, "merges are missing"),
        ({"merges": ["ab"]}, "two parts"),
        ({"merges": ["x y"]}, "not a readable"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"eos_token_id": 99}, "outside its vocabulary of 9"),
        ({"token_type": np.array([1, 2], np.int32)}, "one number a token"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        tokenizer_from_gguf(byte_level(**changes))
