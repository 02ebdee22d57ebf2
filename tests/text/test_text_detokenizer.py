"""Streamed text: no half characters, nothing twice, and the same as the text decoded whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.detokenizer import StreamingDetokenizer
from lowlat.text.tokenizer import Tokenizer

TEXTS = ["Repeat exactly: ďábelské 🔥👋 社区", "A 世ab", "naïve café 👩‍👩‍👧 end", "\u200b한국어 日本語"]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_bytewise_texts_come_in_whole_characters(byte_tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        pieces = stream(byte_tokenizer, list(text.encode()))
        assert "".join(pieces) == text
        assert [piece for piece in pieces if piece] == list(text)


def test_a_character_that_stays_half_is_marked_once_at_the_end(byte_tokenizer: Tokenizer) -> None:
    pieces = stream(byte_tokenizer, [*b"ok ", *"🔥".encode()[:3]])
    assert pieces == ["o", "k", " ", "", "", "", "\ufffd"]


@given(data=st.binary(max_size=60))
@settings(max_examples=300)
def test_any_bytes(byte_tokenizer: Tokenizer, data: bytes) -> None:
    assert "".join(stream(byte_tokenizer, list(data))) == byte_tokenizer.decode(list(data))


@given(ids=st.lists(st.integers(0, 49_160), max_size=40), skip=st.booleans())
@settings(max_examples=200)
def test_any_ids(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = stream(smollm2, ids, skip)
    whole = smollm2.decode(ids, skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=2, max_size=4), data=st.data())
@settings(max_examples=100)
def test_interleaved_requests_do_not_mix(byte_tokenizer: Tokenizer, texts: list[str], data: st.DataObject) -> None:
    queues = [list(text.encode()) for text in texts]
    streams = [StreamingDetokenizer(byte_tokenizer) for _ in texts]
    sent = ["" for _ in texts]
    while open_ := [n for n, queue in enumerate(queues) if queue]:
        n = data.draw(st.sampled_from(open_))
        piece = streams[n].push(queues[n].pop(0))
        assert "\ufffd" not in piece or "\ufffd" in texts[n]
        sent[n] += piece
    assert sent == texts


def test_special_tokens_can_be_shown(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("hi"), 2]
    assert "".join(stream(smollm2, ids)) == "hi"
    assert "".join(stream(smollm2, ids, skip=False)) == "hi<|im_end|>"
