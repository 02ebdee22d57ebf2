"""Sequential proposals: what a CPU can check of layout, plan, noise and compilation."""

from __future__ import annotations

import pytest
import torch

from lowlat_nvidia.draft import reference
from lowlat_nvidia.draft.markov import pack_head
from lowlat_nvidia.draft.plan import SHARED_BYTES, TILE_ROWS, WARPS, MarkovPlan, PlanError


@pytest.mark.parametrize(("rows", "rank"), [(16, 32), (100, 64), (37, 256)])
def test_lanes_multiply_the_rows_they_should(rows, rank):
    """The packed head, read as the matrix instruction's operands are laid out over lanes, gives head . embedding."""
    torch.manual_seed(rows)
    plan = MarkovPlan(rows, rank=rank)
    head = torch.randn(rows, rank).bfloat16()
    embedding = torch.randn(rank).bfloat16().float()
    packed = pack_head(head, plan).float().view(plan.tiles, rank // 16, 32, 4, 2)
    out = torch.zeros(plan.tiles * TILE_ROWS)
    for tile in range(plan.tiles):
        for lane in range(32):
            g, q = divmod(lane, 4)
            own = embedding.view(rank // 32, 4, 2, 2, 2)[:, q]  # pair, instruction, register, element
            for k in range(rank // 16):
                b = own[k // 2, k % 2]
                for register, (row, half) in enumerate(((g, 0), (g + 8, 0), (g, 1), (g + 8, 1))):
                    out[tile * 16 + row] += packed[tile, k, lane, register] @ b[half]
    torch.testing.assert_close(out[:rows], head.float() @ embedding, rtol=1e-5, atol=1e-4)
    assert not out[rows:].any()


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "requests"), [(129280, 1, 1), (129280, 4, 8), (131072, 2, 3), (17, 1, 1)]
)
def test_a_blocks_tiles_fit(vocabulary, ranks, requests):
    plan = MarkovPlan(vocabulary, ranks=ranks, requests=requests)
    assert plan.shared_bytes <= SHARED_BYTES
    assert plan.blocks * plan.tiles_a_block * TILE_ROWS >= plan.local_vocabulary
    assert 0 <= plan.resident <= max(0, plan.tiles_a_block - WARPS)


def test_a_plan_refuses_with_every_reason():
    with pytest.raises(PlanError, match=r"vocabulary.*; rank 100.*; requests 9"):
        MarkovPlan(200_000, rank=100, requests=9)
    with pytest.raises(PlanError, match="multiple of the 3 ranks"):
        MarkovPlan(1000, ranks=3)


def test_noise_is_gumbel_and_fresh_for_each_position_and_seed():
    noise = reference.gumbel(3, 17, 200_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.03)
    for seed, position in ((3, 18), (4, 17), (-3, 17)):
        other = reference.gumbel(seed, position, 200_000)
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.01


def test_sampled_proposals_follow_the_softmax():
    torch.manual_seed(0)
    base = torch.randn(1, 1, 6)
    zero = torch.zeros(6, 32).bfloat16()
    counts = torch.zeros(6)
    for seed in range(4000):
        counts[reference.propose(zero, zero, base, [0], [0.7], [seed], [5])[0].item()] += 1
    expected = (base[0, 0] / 0.7).softmax(-1) * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # chi-square with 5 degrees: p = 0.001


@pytest.mark.parametrize(
    "plan",
    [
        MarkovPlan(129280),
        MarkovPlan(129280, requests=8),
        MarkovPlan(129280, ranks=2),
        MarkovPlan(129280, ranks=4, requests=8),
    ],
    ids=str,
)
def test_the_kernel_compiles_without_spills(plan):
    pytest.importorskip("cuda.bindings.nvrtc")
    from lowlat_nvidia.jit import compile_cubin

    cubin, log = compile_cubin("markov.cu", plan.definitions(), cache=False, verbose=True)
    assert cubin
    assert "0 bytes spill stores, 0 bytes spill loads" in log
