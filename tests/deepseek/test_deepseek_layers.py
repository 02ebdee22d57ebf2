"""Layers alone, on fresh random inputs, against the reference's formulas."""

from __future__ import annotations

import math

import dsv4_layers as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.layers import deepseek_attention as attention
from lowlat.layers import hyper_connections as hyper
from lowlat.layers.deepseek_moe import route
from lowlat.layers.deepseek_rope import TailRope, frequencies, yarn_frequencies


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_sinkhorn_golden_and_sums() -> None:
    logits = torch.tensor(
        [[[0.5, -0.2, 0.1, 0], [1, 0.3, -0.7, 0.2], [-1.1, 0.4, 0.6, 0], [0.25, -0.5, 0.75, 1.5]]],
        dtype=torch.float64,
    )
    golden = [
        [0.340665, 0.226332, 0.250514, 0.182488],
        [0.442157, 0.293761, 0.088614, 0.175467],
        [0.063880, 0.383025, 0.383604, 0.169489],
        [0.153296, 0.096881, 0.277267, 0.472554],
    ]
    np.testing.assert_allclose(hyper.sinkhorn(logits, 20, 1e-6)[0].numpy(), golden, atol=1e-6)
    for mild in (logits, randn(100, 4, 4).double() * 0.3):
        c = hyper.sinkhorn(mild, 20, 1e-6)
        assert float((c.sum(-2) - 1).abs().max()) < 2e-6
        assert float((c.sum(-1) - 1).abs().max()) < 2e-6
    for dtype in (torch.float32, torch.float64):
        c = hyper.sinkhorn((randn(100, 4, 4) * 1.5).to(dtype), 20, 1e-6)
        assert float((c.sum(-2) - 1).abs().max()) < 2e-6
        assert float((c.sum(-1) - 1).abs().max()) < 1e-3, "rows converge more slowly than the columns that end"
        assert float(c.min()) > 0


@pytest.mark.parametrize(("n", "hidden", "rows"), [(4, 64, 9), (2, 8, 1), (3, 16, 5)])
def test_mix_collapse_and_rebuild(n: int, hidden: int, rows: int) -> None:
    m = n * (2 + n)
    streams, out = randn(rows, n, hidden, seed=1), randn(rows, hidden, seed=2)
    fn, base, scale = randn(m, n * hidden, seed=3) / 8, randn(m, seed=4), randn(3, seed=5)
    config = {"hc_mult": n, "hc_eps": 1e-6, "rms_norm_eps": 1e-20, "hc_sinkhorn_iters": 20}
    pre, post, comb = reference.mix(streams.numpy(), fn.numpy(), base.numpy(), scale.numpy(), config)
    mixed = hyper.mix(streams, hyper.MixWeights(fn, base, scale), iterations=20, eps=1e-6, rms_eps=1e-20)
    np.testing.assert_allclose(mixed.pre.numpy(), pre, atol=1e-12)
    np.testing.assert_allclose(mixed.post.numpy(), post, atol=1e-12)
    np.testing.assert_allclose(mixed.comb.numpy(), comb, atol=1e-12)
    np.testing.assert_allclose(
        hyper.rebuild(streams, out, mixed).numpy(), reference.rebuild(streams.numpy(), out.numpy(), post, comb)
    )
    np.testing.assert_allclose(hyper.collapse(streams, mixed.pre).numpy(), reference.collapse(streams.numpy(), pre))


def test_rope_golden_values_and_rotation() -> None:
    omega = yarn_frequencies(32, 160000, factor=16, original=65536, beta_fast=32, beta_slow=1)
    golden = {0: 1, 1: 0.687656022, 15: 0.00363553858, 16: 0.002265625, 20: 2.96977778e-4, 24: 1.953125e-5}
    for index, value in (golden | {25: 5.37231267e-6, 31: 5.68052904e-7}).items():
        assert float(omega[index]) == pytest.approx(value, rel=1e-8)
    positions = torch.tensor([0, 1, 127, 4097, 1_000_000])
    for frequency in (omega, frequencies(32, 10000.0)):
        rope = TailRope(frequency)
        for shape in [(5, 80), (5, 3, 64)]:
            x = randn(*shape, seed=6)
            turned = rope.rotate(x, positions)
            expected = reference.rotate_tail(x.numpy(), positions.numpy(), frequency.numpy())
            np.testing.assert_allclose(turned.numpy(), expected, atol=1e-9)
            np.testing.assert_allclose(rope.rotate(turned, positions, inverse=True).numpy(), x.numpy(), atol=1e-9)


def test_attention_ignores_what_is_not_seen() -> None:
    q, keys, sinks = randn(6, 8, 32), randn(6, 20, 32, seed=1), randn(8, seed=2)
    seen = torch.rand(6, 20, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[4] = False
    out = attention.attend(q, keys, seen, sinks)
    for row in range(6):
        if row == 4:
            assert float(out[4].abs().max()) == 0, "with no key the sink takes everything"
            continue
        expected = reference.attend(q[row].numpy(), keys[row][seen[row]].numpy(), sinks.numpy())
        np.testing.assert_allclose(out[row].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(("ratio", "overlap"), [(2, False), (16, False), (4, True)])
@pytest.mark.parametrize("windows", [1, 2, 5])
def test_compressors(ratio: int, overlap: bool, windows: int) -> None:
    width = 24 * (1 + overlap)
    tokens = ratio * windows + ratio - 1
    c, g = randn(tokens, width, seed=1), 3 * randn(tokens, width, seed=2)
    made = attention.compress(c, g, ratio=ratio, overlap=overlap, previous=False)
    ape = np.zeros((ratio, width))
    make = reference.overlap_entries if overlap else reference.plain_entries
    expected = make(c.numpy(), g.numpy(), ape)
    assert made.shape == (windows, 24)
    np.testing.assert_allclose(made.numpy(), expected, atol=1e-12)
    if overlap and windows > 1:
        later = attention.compress(c[ratio:], g[ratio:], ratio=ratio, overlap=True, previous=True)
        np.testing.assert_allclose(later.numpy(), expected[2:], atol=1e-12)
        later = attention.compress(c, g, ratio=ratio, overlap=True, previous=True)
        np.testing.assert_allclose(later.numpy(), expected[1:], atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    allowed=st.integers(0, (1 << 30) - 1),
    count=st.integers(1, 12),
)
def test_selection_takes_the_best_and_the_lower_of_equals(scores: list[int], allowed: int, count: int) -> None:
    mask = [bool(allowed >> i & 1) for i in range(len(scores))]
    ids = attention.select(torch.tensor([scores], dtype=torch.float32), torch.tensor([mask]), count)[0].tolist()
    order = sorted((i for i in range(len(scores)) if mask[i]), key=lambda i: (-scores[i], i))[:count]
    assert ids == order + [-1] * (count - len(order))


@settings(max_examples=100, deadline=None)
@given(entries=st.integers(1, 40), size=st.integers(1, 5), count=st.integers(1, 12), seed=st.integers(0, 1000))
def test_candidate_blocks(entries: int, size: int, count: int, seed: int) -> None:
    """Every row sees its own prefix; its newest block is always among the chosen."""
    scores = randn(entries, entries, seed=seed)
    positions = torch.arange(entries)
    visible = positions <= positions.unsqueeze(1)
    blocks = attention.candidate_blocks(scores, visible, positions, size=size, count=count)
    inside = attention.in_blocks(blocks, entries, size)
    for p in range(entries):
        best = {b: float(scores[p, b * size : min(p + 1, (b + 1) * size)].max()) for b in range(p // size + 1)}
        best[p // size] = math.inf
        expected = sorted(best, key=lambda b: -best[b])[:count]
        assert sorted(b for b in blocks[p].tolist() if b >= 0) == sorted(expected)
        assert inside[p].tolist() == [e // size in expected for e in range(entries)]


def test_candidates_that_cover_everything_change_nothing() -> None:
    scores = randn(40, 40)
    positions = torch.arange(40)
    visible = positions <= positions.unsqueeze(1)
    blocks = attention.candidate_blocks(scores, visible, positions, size=4, count=10)
    inside = attention.in_blocks(blocks, 40, 4)
    assert torch.equal(visible & inside, visible)
    few = attention.candidate_blocks(scores, visible, positions, size=4, count=3)
    assert not torch.equal(visible & attention.in_blocks(few, 40, 4), visible)


def test_router() -> None:
    logits, bias = 5 * randn(30, 12, seed=1), randn(12, seed=2)
    logits[3] = 80.0
    ids, weights = route(logits, 3, 1.5, bias_RE=bias)
    fixed = torch.randint(0, 12, (30, 3), generator=torch.Generator().manual_seed(3))
    _, hashed = route(logits, 3, 1.5, chosen_RK=fixed)
    for row in range(30):
        expected_ids, expected = reference.route(logits[row].numpy(), bias.numpy(), 3, 1.5, None)
        order = np.argsort(ids[row].numpy())
        assert ids[row].numpy()[order].tolist() == expected_ids.tolist()
        np.testing.assert_allclose(weights[row].numpy()[order], expected, rtol=1e-12)
        _, expected = reference.route(logits[row].numpy(), None, 3, 1.5, fixed[row].numpy())
        np.testing.assert_allclose(hashed[row].numpy(), expected, rtol=1e-12)
