"""Sampling: the right law, the right filters, and nothing that depends on neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.engine.batch import SlotSampling
from lowlat.engine.host_drawing import draw, gumbel, token_keys, uniforms
from lowlat.engine.sampler import BadLogitsError, sample


def setting(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, logprobs: int = -1
) -> SlotSampling:
    return SlotSampling(temperature, top_k, top_p, seed, logprobs)


def law(logits: torch.Tensor, one: SlotSampling) -> torch.Tensor:
    """The distribution that a setting asks for, by the plain definition in float64."""
    probabilities = (logits.double() / one.temperature).softmax(-1)
    order = probabilities.argsort(descending=True, stable=True)
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    kept = order[: one.top_k] if one.top_k else order
    probabilities_kept = probabilities[kept] / probabilities[kept].sum()
    before = probabilities_kept.cumsum(-1) - probabilities_kept
    keep[kept[before < one.top_p]] = True
    filtered = torch.where(keep, probabilities, 0.0)
    return filtered / filtered.sum()


@pytest.mark.parametrize(
    "one",
    [
        setting(),
        setting(0.3),
        setting(1.7),
        setting(top_k=3),
        setting(top_p=0.6),
        setting(1.3, top_k=5, top_p=0.8),
        setting(top_p=1e-4),
        setting(top_k=1),
    ],
    ids=str,
)
def test_draws_follow_the_law(one: SlotSampling):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, generator=generator) * 1.5
    expected = law(logits, one)
    draws = 4000
    counts = torch.zeros(8)
    for position in range(draws):
        counts[sample(logits[None], [one], [position])[0][0]] += 1
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    possible = expected > 0
    chi_square = ((counts[possible] - draws * expected[possible]) ** 2 / (draws * expected[possible])).sum()
    degrees = int(possible.sum()) - 1
    # Far in the tail (about p = 1e-5, Wilson and Hilferty); the draws are fixed, so no run differs from another.
    limit = degrees * (1 - 2 / (9 * max(degrees, 1)) + 4.3 * math.sqrt(2 / (9 * max(degrees, 1)))) ** 3
    assert float(chi_square) <= limit + 1e-6


def test_a_large_vocabulary_with_a_flat_law_needs_the_whole_sort():
    logits = torch.zeros(5000)
    drawn = {sample(logits[None], [setting(top_p=0.9)], [position])[0][0] for position in range(300)}
    assert len(drawn) > 250


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 100_000), row=st.integers(0, 6), size=st.integers(1, 7))
def test_a_seed_decides_whatever_shares_the_batch(seed: int, position: int, row: int, size: int):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[None], [setting(seed=seed)], [position])[0][0]
    row %= size
    others = [setting(0.0 if n % 2 else 0.7, seed=n) for n in range(size)]
    others[row] = setting(seed=seed)
    batch = torch.randn(size, 64)
    batch[row] = logits
    positions = [7] * size
    positions[row] = position
    assert sample(batch, others, positions)[0][row] == alone


def test_random_numbers_are_even_and_differ_by_seed_place_and_token():
    tokens = np.arange(200)
    numbers = torch.tensor(np.concatenate([uniforms(1, position, tokens) for position in range(100)]))
    assert 0 < float(numbers.min()) < 0.001
    assert 0.999 < float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    histogram = torch.histc(numbers, 20, 0, 1)
    assert float(((histogram - 1000) ** 2 / 1000).sum()) < 50
    assert len({float(uniforms(seed, 0, tokens[:1])[0]) for seed in range(1000)}) == 1000
    assert len(set(numbers.tolist())) == 20_000
    assert uniforms(2**64 - 1, 2**31, tokens).tolist() == uniforms(2**64 - 1, 2**31, tokens).tolist()
    assert uniforms(7, 9, tokens[50:60]).tolist() == uniforms(7, 9, tokens)[50:60].tolist()


def test_alike_distributions_draw_the_same_token_often():
    """Two distributions P and Q that differ by a total variation d draw the same token with a chance of at least
    (1 - d) / (1 + d), since they see the same noise."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(400, generator=generator) * 2
    second = first + torch.randn(400, generator=generator) * 0.5
    distance = float((first.softmax(0) - second.softmax(0)).abs().sum()) / 2
    places = range(4000)
    pairs = [sample(torch.stack([first, second]), [setting(seed=5)] * 2, [place] * 2)[0] for place in places]
    same = sum(a == b for a, b in pairs) / len(places)
    assert 0.15 < distance < 0.4
    assert same > (1 - distance) / (1 + distance) - 0.02
    assert same < 1 - distance + 0.02
    assert gumbel(5, 9, np.arange(3)).dtype == torch.float64


@pytest.mark.parametrize("temperature", [1e-5, 0.02, 0.8, 2.0, 50.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 300.0])
def test_the_drawn_token_is_that_of_all_sums(temperature: float, scale: float):
    """What is left out by a bound could not have been drawn: against sums for every token."""
    generator = torch.Generator().manual_seed(4)
    tokens = np.arange(3000)
    few = torch.arange(0, 3000, 7)
    for place in range(60):
        logits = torch.randn(3000, generator=generator) * scale
        logits[:50] = -math.inf
        sums = logits.double().mul_(1.25).div_(temperature) + gumbel(9, place, tokens)
        assert draw(logits, 1.25, temperature, 9, place, None) == int(sums.argmax())
        found = draw(logits[few], 1.25, temperature, 9, place, token_keys(few.numpy()))
        assert found == int(sums[few].argmax())
    assert draw(torch.zeros(1), 1.0, temperature, 9, 0, None) == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-5, 0.8, 50.0])
def test_logits_as_large_as_float32_can_hold_are_drawn_from_without_a_warning(temperature: float):
    most = float(torch.finfo(torch.float32).max)
    masked = torch.full((300,), -most)  # a mask that is not infinite
    masked[[5, 7]] = 0.0
    noise = gumbel(9, 3, np.arange(300))
    assert draw(masked, 1.0, temperature, 9, 3, None) == (5 if noise[5] > noise[7] else 7)
    assert draw(-masked, 1.0, temperature, 9, 3, None) == int((-masked.double() / temperature + noise).argmax())
    assert draw(torch.full((3,), -math.inf), 1.0, temperature, 9, 3, None) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_tiny_temperatures_are_greedy(temperature: float, scale: float):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2)) * scale
    logits[:, 7] = logits.max() + scale
    assert sample(logits, [setting(temperature)] * 3, [1, 2, 3])[0] == [7, 7, 7]


def test_masked_tokens_stay_masked_beside_greedy_rows():
    logits = torch.full((2, 50), float("-inf"))
    logits[:, 10:13] = 0.0
    for position in range(50):
        tokens, _ = sample(logits, [setting(0.0), setting(0.9, top_p=0.5)], [position, position])
        assert all(10 <= token < 13 for token in tokens)


def test_logprobs_are_of_the_untouched_distribution():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)) * 3
    expected = logits.double().log_softmax(-1)
    tokens, entries = sample(logits, [setting(0.5, top_k=2, logprobs=4), setting(0.0, logprobs=-1)], [0, 0])
    assert entries is not None
    assert entries[1] is None
    entry = entries[0]
    assert entry is not None
    assert entry.logprob == pytest.approx(float(expected[0, tokens[0]]), abs=1e-5)
    assert entry.rank == int((expected[0] > expected[0, tokens[0]]).sum()) + 1
    top = expected[0].topk(4)
    assert entry.top_ids == top.indices.tolist()
    assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    _, entries = sample(logits[:1], [setting(0.0, logprobs=0)], [0])
    assert entries is not None
    assert entries[0] is not None
    assert (entries[0].rank, entries[0].top_ids) == (1, [])


def test_nan_is_named():
    with pytest.raises(BadLogitsError, match="NaN"):
        sample(torch.tensor([[0.0, float("nan"), 1.0]]), [setting(0.0)], [0])
