"""Answers made of bursts: text, ids, logprobs and counts end at the same token, streamed or whole."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.output import LOWEST_LOGPROB, Delta, OutputAssembler
from lowlat.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Entry:
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


def entry(n: int) -> Entry:
    return Entry(-0.1 * n, [n % 256, 97], [-0.1 * n, -5.0])


def bursts(ids: list[int], cuts: list[int]) -> list[range]:
    return [range(a, b) for a, b in zip([0, *cuts], [*cuts, len(ids)])]


def run(tokenizer: Tokenizer, ids: list[int], parts: list[range], **options: object) -> list[Delta]:
    assembler = OutputAssembler(tokenizer, logprobs=True, **options)
    deltas = []
    for part in parts:
        last = "length" if part.stop == len(ids) else None
        deltas.append(assembler.push([ids[n] for n in part], [entry(n) for n in part], last))
        if deltas[-1].finished:
            break
    assert assembler.finished
    assert assembler.completion_tokens == deltas[-1].completion_tokens
    return deltas


def joined(deltas: list[Delta]) -> tuple[object, ...]:
    last = deltas[-1]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    ids = [i for delta in deltas for i in delta.token_ids]
    logprobs = [item for delta in deltas for item in delta.logprobs or []]
    text = "".join(delta.text for delta in deltas)
    return text, ids, logprobs, last.completion_tokens, last.finish_reason, last.stop_reason


@given(
    text=st.text("ab 🔥世", max_size=20),
    tail=st.binary(max_size=3),
    stops=st.lists(st.text("ab 🔥世", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    least=st.integers(0, 12),
    data=st.data(),
)
@settings(max_examples=400)
def test_any_bursts_equal_one_token_at_a_time(
    byte_tokenizer: Tokenizer,
    text: str,
    tail: bytes,
    stops: list[str],
    include: bool,
    least: int,
    data: st.DataObject,
) -> None:
    ids = [*text.encode(), *tail, 97]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6))) if len(ids) > 1 else []
    options = {"stop": stops, "include_stop": include, "min_tokens": least}
    single = joined(run(byte_tokenizer, ids, bursts(ids, list(range(1, len(ids)))), **options))
    burst = joined(run(byte_tokenizer, ids, bursts(ids, cuts), **options))
    assert burst == single
    answer, kept, logprobs, count, reason, stop = burst
    assert kept == ids[: len(kept)]
    assert len(logprobs) == len(kept) == count
    if reason == "stop":
        assert stop in stops
        assert count > least
        whole = byte_tokenizer.decode(kept)
        assert whole.startswith(answer)
        assert stop in whole
    else:
        assert kept == ids
        assert answer == byte_tokenizer.decode(ids)


def test_a_burst_that_completes_a_stop_string_ends_there(byte_tokenizer: Tokenizer) -> None:
    ids = list(b"ha ha ha ha ha")
    deltas = run(byte_tokenizer, ids, bursts(ids, [3]), stop=[" ha ha"])
    assert joined(deltas)[0] == "ha"
    assert sum(len(delta.token_ids) for delta in deltas) == 8 == deltas[-1].completion_tokens
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " ha ha")


def test_stop_before_min_tokens_is_text(byte_tokenizer: Tokenizer) -> None:
    ids = list(b"a\nb\nc\n")
    for least, expected in ((0, "a"), (1, "a"), (2, "a\nb"), (3, "a\nb"), (4, "a\nb\nc"), (6, "a\nb\nc\n")):
        answer, *_ = joined(run(byte_tokenizer, ids, bursts(ids, []), stop=["\n"], min_tokens=least))
        assert answer == expected


def test_offsets_count_characters_of_the_text(byte_tokenizer: Tokenizer) -> None:
    ids = list("a世b".encode())
    deltas = run(byte_tokenizer, ids, bursts(ids, [2, 4]), text_offset=10)
    entries = joined(deltas)[2]
    assert [item.offset for item in entries] == [10, 11, 11, 11, 12]
    assert b"".join(item.bytes for item in entries) == "a世b".encode()
    assert entries[1].text == "bytes:\\xe4"
    assert entries[0].top[1].text == "a"


def test_the_engine_ends_the_answer(byte_tokenizer: Tokenizer) -> None:
    assembler = OutputAssembler(byte_tokenizer, stop=["abcd"])
    assert assembler.push(list(b"xabc")).text == "x"
    last = assembler.push([256], finish_reason="stop", stop_reason=256)
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("abc", [256], "stop", 256)
    with pytest.raises(ValueError, match="has ended"):
        assembler.push([97])


def test_an_abort_without_tokens_releases_what_was_held(byte_tokenizer: Tokenizer) -> None:
    assembler = OutputAssembler(byte_tokenizer, stop=["abcd"])
    assembler.push(list(b"ab"))
    last = assembler.push([], finish_reason="abort")
    assert (last.text, last.finished, last.finish_reason, last.completion_tokens) == ("ab", True, "abort", 2)


def test_infinite_logprobs_become_finite(byte_tokenizer: Tokenizer) -> None:
    assembler = OutputAssembler(byte_tokenizer, logprobs=True)
    delta = assembler.push([97], [Entry(-math.inf, [97, 98], [-math.inf, math.nan])])
    assert delta.logprobs is not None
    assert [delta.logprobs[0].logprob, *(top.logprob for top in delta.logprobs[0].top)] == [LOWEST_LOGPROB] * 3


def test_missing_logprobs_are_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="logprob entries"):
        OutputAssembler(byte_tokenizer, logprobs=True).push([97, 98], [entry(0)])
    assert OutputAssembler(byte_tokenizer).push([97]).logprobs is None
