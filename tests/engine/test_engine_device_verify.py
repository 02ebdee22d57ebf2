"""Checking guesses on the device: tokens and what counts of them are those of the sampler on the host, which judges row
after row; and widths are chosen by measured times and acceptance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.cache.layout import KVLayout
from lowlat.engine.batch import PlanLimits, SlotSampling
from lowlat.engine.device_sampler import SamplingMode, choose
from lowlat.engine.device_speculation import DeviceSpeculation, step_widths
from lowlat.engine.device_state import DeviceState
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.sampler import sample_bursts
from lowlat.layers.device_reference import ReferenceOps
from lowlat.speculative.proposer import DraftRequest
from lowlat.speculative.step_times import StepTimes

VOCABULARY = 12
WIDTH = 4

SETTING = st.builds(
    SlotSampling,
    temperature=st.sampled_from([0.0, 0.4, 1.1]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, (1 << 64) - 1),
    logprobs=st.just(-1),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((2, 1.5), (5, -2.0))]),
    banned=st.sampled_from([(), (1, 7)]),
    banned_until=st.integers(0, 30),
    width=st.integers(2, WIDTH),
    end=st.integers(12, 30),
    prompt=st.just((3, 4, 3)),
    answer=st.just((5,)),
)


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(SETTING, min_size=1, max_size=3),
    lengths=st.lists(st.integers(8, 11), min_size=3, max_size=3),
    seed=st.integers(0, 1 << 30),
    steps=st.integers(1, 3),
)
def test_what_counts_is_what_the_host_would_count(chosen, lengths, seed, steps):
    limits = PlanLimits(max_batch=3, max_rows=16, max_pages=40)
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, page_size=1, pages=200, dtype="float32")
    state = DeviceState(limits, layout, VOCABULARY, torch.device("cpu"))
    slots = list(range(len(chosen)))
    rules = [LogitRules.of(setting) for setting in chosen]
    for slot, setting, rule in zip(slots, chosen, rules, strict=True):
        state.begin(slot, setting, rule is not None)
    lengths = lengths[: len(chosen)]
    state.set_lengths(slots, lengths)
    generator = torch.Generator().manual_seed(seed)
    mode = SamplingMode(True, True, any(rule is not None for rule in rules))
    slots_B, ops = torch.tensor(slots), ReferenceOps()
    for _ in range(steps):
        guesses_BG = torch.randint(0, VOCABULARY, (len(slots), WIDTH - 1), generator=generator)
        logits = torch.randn(len(slots), WIDTH, VOCABULARY, generator=generator)
        # Guesses are often right, so that bursts of all lengths occur.
        logits[:, :-1].scatter_add_(2, guesses_BG[..., None], torch.full((len(slots), WIDTH - 1, 1), 3.0))
        logits[torch.rand(len(slots), WIDTH, generator=generator) < 0.03] = float("nan")
        rows = [max(1, min(one.width, one.end - length)) for one, length in zip(chosen, lengths, strict=True)]
        guesses = [row[: count - 1] for row, count in zip(guesses_BG.tolist(), rows, strict=True)]
        wanted = torch.cat([logits[index, :count] for index, count in enumerate(rows)])
        places = [length + 1 for length in lengths]
        expected, _ = sample_bursts(wanted, chosen, places, rules, guesses)
        begun = ops.begin_rows(slots_B, state.slots, guesses_BG, None)
        assert begun.rows_B.tolist() == rows
        assert begun.next_R.view(-1, WIDTH)[:, 0].tolist() == places
        samples = choose(logits.flatten(0, 1), begun.slots_R, begun.next_R, state, mode, ops, guesses_BG)
        result = ops.accept(samples.tokens_M, begun, slots_B, state.slots, guesses_BG, None)
        counts_R = (torch.arange(WIDTH) < result[:, :1]).flatten()
        state.count(begun.slots_R, samples.tokens_M.clamp(min=0), counts_R)
        bursts = [row[: max(0, count)] for count, _, *row in result.tolist()]
        assert bursts == expected
        if not all(bursts):
            assert [count for count, *_ in result.tolist() if count < 0], "a broken row is told apart"
            return  # its request ends, and the host's rules have seen tokens that do not count
        lengths = [
            min(length + len(burst), one.end - 1) for length, burst, one in zip(lengths, bursts, chosen, strict=True)
        ]
        assert state.lengths_T[: len(slots)].tolist() == lengths
        assert state.tokens_T[: len(slots)].tolist() == [burst[-1] for burst in bursts]


def speculation(**options: Any) -> DeviceSpeculation:
    return DeviceSpeculation(**{"width": 8, "adaptive": True} | options)


def test_widths_are_few():
    assert step_widths(8, True) == [1, 2, 4, 8]
    assert step_widths(7, True) == [1, 2, 4, 7]
    assert step_widths(7, False) == [1, 7]
    assert step_widths(2, True) == [1, 2]


class NoDraft:
    """A draft that nobody asks here."""

    propose = None

    def begin(self, slot, tokens):
        pass


def request(slot: int = 0, most: int = 7) -> DraftRequest:
    return DraftRequest(5, 20, slot, most)


@pytest.mark.parametrize(("right", "width"), [(1.0, 8), (0.0, 1)])
def test_the_width_follows_acceptance_and_times(right, width):
    """Steps of eight rows take 1.5 times as long as plain ones: worth it where guesses are right, and only there."""
    deciding = speculation(draft=NoDraft())
    deciding.times[1] = StepTimes({1: 1.0, 2: 1.3, 4: 1.4, 8: 1.5})
    deciding.begin(0, SlotSampling(0.0, 0, 1.0, 0, -1, width=8))
    for _ in range(40):
        deciding.judge(0, list(range(8)) if right else [3], 8, 8)
    widths = [deciding.plan([request()], 1) for _ in range(16)]
    # Now and then the widest is tried even so.
    assert sorted(set(widths)) == sorted({width, 8})
    assert widths.count(width) >= 14
    assert deciding.plan([request(most=0)], 1) == 1


def test_seconds_run_from_result_to_result():
    now = iter([3.0, 3.5, 9.0])
    deciding = speculation(draft=NoDraft(), clock=lambda: next(now))
    deciding.times[2] = StepTimes({1: 1.0, 4: 2.0})
    about_one = pytest.approx(1.0, abs=0.1)  # what one width takes moves the others' times a little
    assert deciding.time_step(2.0, 2, 4) == (1.0, about_one)
    assert deciding.time_step(2.1, 2, 4) == (0.5, about_one), "launched before the result of the one before it"
    assert deciding.time_step(8.0, 2, 1) == (1.0, 1.0)
    assert deciding.times[2](4) < 2.0
