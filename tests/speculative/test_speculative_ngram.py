"""Prompt lookup: guesses are what followed before; answers with and without guesses are the same."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.engine.batch import SlotSampling
from lowlat.engine.build import SetupError
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.request import SamplingParams
from lowlat.engine.sampler import sample, sample_bursts
from lowlat.offline import Engine
from lowlat.speculative.ngram import NgramHistory

SHORT = json.loads((Path(__file__).parent.parent / "data" / "smollm2_135m_instruct_fp32_greedy.json").read_text())


def plain_guess(tokens: list[int], count: int) -> list[int]:
    """The definition, by search: the latest earlier place of the longest suffix of 6 to 1 tokens."""
    for size in (6, 5, 4, 3, 2, 1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                guesses = list(tokens)
                for source in range(end, end + count):
                    guesses.append(guesses[source])
                return guesses[len(tokens) :]
    return []


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), max_size=30), count=st.integers(0, 7))
def test_guesses_follow_the_latest_occurrence(tokens: list[int], count: int):
    history = NgramHistory()
    for token in tokens:
        history.observe([token])
    assert history.propose(count).tokens == (plain_guess(tokens, count) if count else [])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    guessed=st.lists(st.integers(0, 4), max_size=5),
    setting=st.sampled_from(
        [
            SlotSampling(0.0, 0, 1.0, 3, -1),
            SlotSampling(0.9, 0, 1.0, 3, 2),
            SlotSampling(1.3, 3, 0.8, 3, -1, min_p=0.1),
            SlotSampling(0.7, 0, 1.0, 3, 0, 0.0, 1.3, 0.5, 0.7, logit_bias=((1, 1.0),), banned=(2,), banned_until=12),
        ]
    ),
)
def test_a_burst_is_what_single_rows_would_choose(seed: int, guessed: list[int], setting: SlotSampling):
    """The law of every token is the model's own: each equals, bit for bit, what a step with one row chooses."""
    logits = torch.randn(len(guessed) + 1, 5, generator=torch.Generator().manual_seed(seed)) * 2
    rules = LogitRules.of(setting)
    bursts, logprobs = sample_bursts(logits, [setting], [10], [rules], [guessed])
    alone_rules = LogitRules.of(setting)
    expected = []
    for row in range(len(guessed) + 1):
        tokens, entries = sample(logits[row : row + 1], [setting], [10 + row], [alone_rules])
        if setting.logprobs >= 0:
            assert logprobs is not None
            assert entries is not None
            assert logprobs[row] == entries[0]
        expected += tokens
        if row < len(guessed) and tokens[0] != guessed[row]:
            break
    assert bursts == [expected]


REPEATING = "Repeat: one two three four five six seven. one two three four five six seven. one two three four"
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"


@pytest.fixture(scope="module")
def engines():
    settings = {"model": "smollm2", "threads": 1, "kv_tokens": 2048, "low_latency": "off", "dtype": "float32"}
    with Engine(**settings) as plain, Engine(spec="ngram", spec_width=6, **settings) as guessing:
        yield plain, guessing


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=32, temperature=0, logprobs=2),
        SamplingParams(max_tokens=24, temperature=0.8, seed=7, top_p=0.95, logprobs=0),
        SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.1, frequency_penalty=0.2, min_tokens=20),
        SamplingParams(max_tokens=7, temperature=0, ignore_eos=True),
    ],
    ids=["greedy", "drawn", "penalties", "short"],
)
def test_answers_are_the_same(engines: tuple[Engine, Engine], sampling: SamplingParams):
    plain, guessing = engines
    prompts = [REPEATING, CODE, SHORT["cases"][0]["prompt"]]
    before = msgspec.structs.replace(guessing._core.stats())
    for one, other in zip(plain.generate(prompts, sampling), guessing.generate(prompts, sampling), strict=True):
        assert other.token_ids == one.token_ids
        assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
        assert other.usage.completion_tokens == one.usage.completion_tokens
        if sampling.logprobs is not None:
            assert [e.logprob for e in other.logprobs] == pytest.approx([e.logprob for e in one.logprobs], abs=1e-3)
    while guessing._core.has_work:  # a step launched ahead of the end
        guessing._core.turn()
    after = guessing._core.stats()
    assert after.guessed_tokens - before.guessed_tokens >= after.accepted_tokens - before.accepted_tokens > 0
    assert plain._core.stats().guessed_tokens == 0
    guessing._core.scheduler.check()
    assert guessing._core.scheduler.cache.pool.held == 0


def test_a_stop_string_inside_a_burst_ends_at_the_same_token(engines: tuple[Engine, Engine]):
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    stop = engines[0].generate(REPEATING, sampling).text[20:32]
    one, other = (engine.generate(REPEATING, sampling, stop=[stop]) for engine in engines)
    assert (other.text, other.token_ids, other.stop_reason) == (one.text, one.token_ids, stop)
    assert 0 < len(one.token_ids) < 24


def test_a_request_may_decline(engines: tuple[Engine, Engine]):
    _, guessing = engines
    before = guessing._core.stats().guessed_tokens
    guessing.generate(REPEATING, SamplingParams(max_tokens=20, temperature=0, speculate=False))
    assert guessing._core.stats().guessed_tokens == before


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"spec": "oracle"}, "known: off, ngram"),
        (
            {"spec": "draft"},
            r"no draft in its checkpoint; use --spec dspark \(its draft comes with lowlat\), ngram, off",
        ),
        ({"spec": "ngram", "spec_width": 1}, "use 2 to 16"),
        ({"spec_simulate_acceptance": 2.0}, "add --spec ngram"),
        ({"spec": "ngram", "spec_width": 3, "spec_simulate_acceptance": 3.51}, "a step of 3 rows brings 1 to 3"),
    ],
)
def test_what_does_not_work_is_refused(settings_: dict, message: str):
    with pytest.raises(SetupError, match=message):
        Engine(model="smollm2", threads=1, **settings_)
