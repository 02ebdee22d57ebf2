"""Penalties, bias, min_tokens and min_p by their definitions; prompt scores that are right whatever is cached."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_simulator import drain, make_core, make_request

from lowlat.engine.batch import SlotSampling
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.request import FinishReason, SamplingParams
from lowlat.engine.sampler import sample
from lowlat.offline import Engine


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=8),
    answer=st.lists(st.integers(0, 11), max_size=12),
    repetition=st.sampled_from([1.0, 0.7, 1.3]),
    presence=st.sampled_from([0.0, -0.5, 1.5]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, 0.5, 5.0]), max_size=3),
    split=st.integers(0, 12),
)
def test_rules_follow_their_definitions(prompt, answer, repetition, presence, frequency, bias, split):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0))
    untouched = logits.clone()
    expected = []
    for token in range(12):
        value = float(logits[token]) + bias.get(token, 0.0)
        if token in prompt or token in answer:
            value = value / repetition if value > 0 else value * repetition
        count = answer.count(token)
        expected.append(value - frequency * count - presence * (count > 0))
    given_answer, later = answer[:split], answer[split:]  # a resumed request knows its answer so far
    rules = LogitRules.of(
        SlotSampling(
            0.0, 0, 1.0, 0, -1, 0.0, repetition, presence, frequency,
            tuple(bias.items()), prompt=tuple(prompt), answer=tuple(given_answer),
        )
    )  # fmt: skip
    if rules is None:
        assert (repetition, presence, frequency, bias) == (1.0, 0.0, 0.0, {})
        return
    for token in later:
        rules.observe(token)
    # float32 rules beside a float64 definition: the error grows with the value (a bias of -100 times a penalty)
    torch.testing.assert_close(rules.apply(logits, 5), torch.tensor(expected), atol=1e-5, rtol=1e-6)
    assert torch.equal(logits, untouched)


def test_banned_tokens_come_only_later():
    setting = SlotSampling(0.0, 0, 1.0, 0, -1, banned=(3, 5), banned_until=10)
    logits = torch.zeros(1, 8)
    logits[0, 3], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    rules = [LogitRules.of(setting)]
    assert sample(logits, [setting], [9], rules)[0] == [6]
    assert sample(logits, [setting], [10], rules)[0] == [3]


@pytest.mark.parametrize("width", [8, 2000])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_min_p_keeps_what_is_near_the_best(width: int, top_p: float):
    probabilities = torch.full((width,), 1e-5)
    probabilities[1], probabilities[4], probabilities[6] = 0.5, 0.26, 0.2
    logits = probabilities.log()[None]
    setting = SlotSampling(1.0, 0, top_p, 7, -1, min_p=0.5)
    assert {sample(logits, [setting], [position])[0][0] for position in range(200)} == {1, 4}


def test_logprobs_stay_the_models_own():
    logits = torch.randn(1, 30)
    setting = SlotSampling(0.0, 0, 1.0, 0, 2, logit_bias=((7, 100.0),))
    tokens, entries = sample(logits, [setting], [0], [LogitRules.of(setting)])
    assert tokens == [7]
    assert entries is not None
    assert entries[0] is not None
    assert entries[0].logprob == pytest.approx(float(logits.log_softmax(-1)[0, 7]), abs=1e-5)


@pytest.fixture(scope="module")
def engine():
    settings = {"kv_tokens": 2048, "threads": 1, "chunk_tokens": 16, "low_latency": "off"}
    with Engine(model="smollm2", **settings) as engine:
        yield engine


def test_a_banned_word_never_comes_and_bias_forces_one(engine: Engine):
    prompt = "50x 'the': the the the the"
    plain = engine.generate(prompt, SamplingParams(max_tokens=15, temperature=0))
    word = max(set(plain.token_ids), key=plain.token_ids.count)
    banned = engine.generate(prompt, SamplingParams(max_tokens=15, temperature=0, logit_bias=((word, -100.0),)))
    assert word not in banned.token_ids
    forced = engine.generate(prompt, SamplingParams(max_tokens=3, temperature=0.9, logit_bias=((1234, 100.0),)))
    assert forced.token_ids == [1234] * 3


def test_penalties_end_a_loop(engine: Engine):
    prompt = "the the the the the the the the"
    loop = engine.generate(prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)).token_ids
    for name in ("frequency_penalty", "presence_penalty"):
        fresh = engine.generate(prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, **{name: 2.0}))
        assert len(set(fresh.token_ids)) > len(set(loop))


def test_min_tokens_hold_back_the_end(engine: Engine):
    prompt = "The capital of France is"
    plain = engine.generate(prompt, SamplingParams(max_tokens=60, temperature=0))
    assert plain.finish_reason == "stop"
    assert len(plain.token_ids) == 30
    longer = engine.generate(prompt, SamplingParams(max_tokens=60, min_tokens=40, temperature=0))
    assert longer.token_ids[:29] == plain.token_ids[:29]
    assert len(longer.token_ids) >= 40
    assert 2 not in longer.token_ids[:40]


def test_prompt_scores_equal_the_oracle_cold_and_cached(engine: Engine):
    import json
    from pathlib import Path

    data = Path(__file__).parent.parent / "data" / "smollm2_135m_instruct_fp32_greedy.json"
    for case in json.loads(data.read_text())["cases"]:
        for _ in range(2):
            scored = engine.generate(case["input_ids"], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
            assert [entry.logprob for entry in scored.prompt_logprobs] == pytest.approx(
                case["prompt_logprobs"], abs=2e-3
            )
            assert scored.token_ids == case["output_ids"][:1]
        only = engine.generate(case["input_ids"], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert (only.token_ids, only.finish_reason, only.usage.completion_tokens) == ([], "length", 0)
        assert len(only.prompt_logprobs) == len(case["input_ids"]) - 1
    assert engine._core.scheduler.cache.pool.held == 0


def test_scoring_alone_gives_pages_back():
    core, device = make_core()
    core.submit(make_request("a", [1, 2, 3, 4, 5, 6], 0))
    outputs = []
    while core.has_work:
        outputs.extend(core.turn())
        core.scheduler.check()
        device.check()
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], FinishReason.LENGTH)]
    assert drain(core, device) == {}
    assert core.scheduler.cache.pool.held == 0
