"""Sampling on the device follows the sampler of CPUs, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.cache.layout import KVLayout
from lowlat.engine import host_drawing
from lowlat.engine.batch import PlanLimits, SlotSampling
from lowlat.engine.device_sampler import SamplingMode, choose
from lowlat.engine.device_state import DeviceState
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.sampler import sample
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.drawing import uniforms

VOCABULARY = 300
SLOTS = 6


def make_state() -> DeviceState:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_size=4, pages=4, dtype="float32")
    return DeviceState(PlanLimits(max_batch=SLOTS, max_rows=8, max_pages=4), layout, VOCABULARY, torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, (1 << 64) - 1), position=st.integers(0, 1 << 20), first=st.integers(0, 1 << 18))
def test_random_numbers_are_the_same_bits(seed, position, first):
    signed = seed - (1 << 64) if seed >> 63 else seed
    ids = torch.arange(first, first + 9)
    mine = uniforms(torch.tensor([signed]), torch.tensor([position]), ids)[0]
    assert mine.tolist() == host_drawing.uniforms(seed, position, ids.numpy()).tolist()


SETTINGS = st.builds(
    SlotSampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.6, 0.99]),
    seed=st.integers(0, (1 << 64) - 1),
    logprobs=st.sampled_from([-1, 0, 3, 300]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.sampled_from([(), ((5, 3.0), (7, -100.0))]),
    banned=st.sampled_from([(), (0, 1, 2, 3)]),
    banned_until=st.integers(0, 40),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=20).map(tuple),
    answer=st.lists(st.integers(0, VOCABULARY - 1), max_size=20).map(tuple),
)


@settings(max_examples=120, deadline=None)
@given(
    chosen=st.lists(SETTINGS, min_size=1, max_size=SLOTS),
    positions=st.lists(st.integers(1, 60), min_size=SLOTS, max_size=SLOTS),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 3.0, 20.0]),
    steps=st.integers(1, 3),
)
def test_tokens_are_those_of_the_sampler(chosen, positions, seed, spread, steps):
    state = make_state()
    slots = list(range(SLOTS))[-len(chosen) :]
    rules = [LogitRules.of(setting) for setting in chosen]
    for slot, setting, rule in zip(slots, chosen, rules, strict=True):
        state.begin(slot, setting, rule is not None)
    mode = SamplingMode(True, True, any(rule is not None for rule in rules), max(one.logprobs for one in chosen))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        logits = torch.randn(len(chosen), VOCABULARY, generator=generator) * spread
        places = [position + step for position in positions[: len(chosen)]]
        expected, logprobs = sample(logits, chosen, places, rules)
        where = torch.tensor(slots)
        samples = choose(logits, where, torch.tensor(places), state, mode, ReferenceOps())
        state.set_tokens(slots, expected)
        assert samples.tokens_M.tolist() == expected
        for row, entry in enumerate(logprobs or []):
            if entry is None:
                continue
            assert float(samples.chosen_M[row]) == pytest.approx(entry.logprob, abs=1e-5)
            assert int(samples.ranks_M[row]) == entry.rank
            count = len(entry.top_ids)
            if count:
                assert samples.top_ids_MC[row, :count].tolist() == entry.top_ids
                assert samples.top_MC[row, :count].tolist() == pytest.approx(entry.top_logprobs, abs=1e-5)


def test_a_mode_does_only_what_it_says():
    state = make_state()
    logits = torch.randn(2, VOCABULARY)
    logits[1, 3] = float("nan")
    samples = choose(logits, torch.tensor([0, 1]), torch.tensor([4, 4]), state, SamplingMode(), ReferenceOps())
    assert samples.tokens_M.tolist() == [int(logits[0].argmax()), -1]
    assert len(samples.tensors()) == 1
    assert state.rules is None
