"""The attention chain on a Hopper GPU against plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import (
    DEFAULT_SPIN_LIMIT,
    THREADS,
    AttentionChain,
    ChainDeadlineError,
    ChainPlan,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

PLANS = {
    "headline": ChainPlan(),
    "small": ChainPlan(hidden=1024, latent=256, groups=2, group_outputs=128),
}
# FP8 quantisation of what comes between turns a last bit into a step of 1/16 for single values; relative to the norm.
# With few keys values take such steps together: test_nvidia_chain_numerics.py derives both bounds.
BOUND, FEW_KEYS_BOUND = 1.5e-2, 2.5e-2


@pytest.fixture(scope="module", params=PLANS)
def built(request):
    torch.manual_seed(2)
    weights = reference.random_weights(PLANS[request.param], "cuda")
    return AttentionChain(PLANS[request.param], weights), weights


def poison(chain: AttentionChain) -> None:
    """Words that kernels exchange are empty, which is NaN, before they are published: only the output can be stale."""
    chain.out_RO.fill_(float("nan"))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("rows", "window", "chosen"),
    [(1, 128, 512), (4, 128, 512), (6, 128, 512), (8, 128, 512), (2, 9, 0), (3, 40, 77), (1, 1, 0)],
)
def test_against_plain_pytorch(built, rows, window, chosen, early):
    chain, weights = built
    torch.manual_seed(rows * 1000 + chosen)
    inputs = reference.random_inputs(chain.plan, rows, "cuda", window=max(window, rows), chosen=chosen)
    theirs = copy.deepcopy(inputs)
    poison(chain)
    out = chain.run(inputs, early=early).float()
    chain.check()
    expected, data, scales = reference.attention_region(weights, theirs, chain.plan.groups, chain.eps)
    assert out.isfinite().all()
    assert ((out - expected).norm() / expected.norm()).item() < (BOUND if chosen else FEW_KEYS_BOUND)
    # Keys: the bytes of the own entries are nearly all the same, and no other byte of the window changed.
    for row in range(rows):
        mine, mine_scales = reference._window_entry(inputs, int(inputs.window_RW[row, -1]))
        assert (mine == data[row]).float().mean() > 0.97
        assert torch.equal(mine_scales, scales[row])
        mine.copy_(data[row])
    assert torch.equal(inputs.window, theirs.window)
    assert torch.equal(inputs.chosen, theirs.chosen)
    for words in chain.exchanged[:2]:
        assert (words == 255).all()


def test_a_row_is_the_same_bits_beside_any_neighbours(built):
    chain, _ = built
    inputs = reference.random_inputs(chain.plan, 5, "cuda")
    together = chain.run(inputs).clone()
    first = copy.deepcopy(inputs)
    for name in ("x_RH", "angles_R2P", "window_RW", "chosen_RC"):
        setattr(first, name, getattr(inputs, name)[:1].contiguous())
    assert torch.equal(chain.run(first), together[:1])


def test_ten_thousand_replays_repeat_bit_for_bit(built):
    """Two regions a replay: the second overlaps the first, and both use the same words."""
    chain, _ = built
    inputs = reference.random_inputs(chain.plan, 6, "cuda")
    chain.run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = chain.run(inputs).clone()
        chain.run(inputs)
        out = chain.run(inputs)
    graph.replay()
    first, wrong = out.clone(), torch.zeros((), dtype=torch.long, device="cuda")
    for replay in range(10_000):
        if replay % 1000 == 0:
            poison(chain)
        graph.replay()
        wrong += (out != first).sum() + (before != first).sum()
    assert wrong.item() == 0
    chain.check()


def test_a_missed_deadline_is_named_and_the_next_step_is_right(built):
    chain, _ = built
    inputs = reference.random_inputs(chain.plan, 2, "cuda")
    expected = chain.run(inputs).clone()
    torch.cuda.synchronize()
    chain.spin_limit = 1000
    stream = torch.cuda.current_stream().cuda_stream
    chain.kernels["up"].launch_early(
        chain.launches(2)["up"], THREADS, chain.parameters(inputs), stream, dependent=False
    )
    with pytest.raises(ChainDeadlineError):
        chain.check()
    chain.spin_limit = DEFAULT_SPIN_LIMIT
    assert torch.equal(chain.run(inputs), expected)
    chain.check()
