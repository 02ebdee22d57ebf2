"""Routed experts on a Hopper GPU against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import experts_reference as reference
from lowlat_nvidia.deepseek_v4.experts import RoutedExperts
from lowlat_nvidia.deepseek_v4.experts_plan import MAX_ROWS, ExpertsPlan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

PLANS = {
    "headline": ExpertsPlan(),
    "small": ExpertsPlan(hidden=2048, inner=128, experts=64, top=4),
    "least": ExpertsPlan(hidden=1024, inner=64, experts=32, top=2),
}
# Values after FP8 quantisation differ by a step where float32 sums round differently; relative to the output's norm.
BOUND = 4e-3


@pytest.fixture(scope="module", params=PLANS)
def built(request):
    plan = PLANS[request.param]
    torch.manual_seed(1)
    weights = reference.random_experts(plan.experts, plan.hidden, plan.inner, "cuda")
    gate = (torch.randn(plan.experts, plan.hidden, device="cuda") / plan.hidden**0.5).bfloat16()
    bias = torch.randn(plan.experts, device="cuda") * 0.1
    return RoutedExperts(plan, gate, bias, weights), weights


def poison(mixture: RoutedExperts) -> None:
    for tensor in (mixture.logits_RE, mixture.parts, mixture.weights_RT, mixture.out_RH):
        tensor.fill_(float("nan"))
    for tensor in (mixture.inner, mixture.chosen_RT):
        tensor.fill_(-1)


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_against_plain_pytorch(built, rows):
    mixture, weights = built
    plan = mixture.plan
    for seed in range(3):
        torch.manual_seed(100 * rows + seed)
        x = torch.randn(rows, plan.hidden, device="cuda").bfloat16()
        poison(mixture)
        out = mixture.run(x).clone()
        mixture.check()
        logits = mixture.logits_RE[:rows]
        torch.testing.assert_close(logits.double(), x.double() @ mixture.gate.double().T, rtol=1e-5, atol=1e-5)
        chosen, shares = reference.choose(logits, mixture.bias, plan.top, plan.scaling)
        assert torch.equal(mixture.chosen_RT[:rows].long(), chosen)
        torch.testing.assert_close(mixture.weights_RT[:rows], shares, rtol=1e-5, atol=1e-6)
        expected = reference.routed(x, weights, chosen, shares, plan.limit)
        assert out.isfinite().all()
        assert ((out - expected).norm() / expected.norm()).item() < BOUND


def test_ties_go_to_the_lowest_number(built):
    mixture, _ = built
    plan = mixture.plan
    gate, bias = mixture.gate.clone(), mixture.bias.clone()
    mixture.gate.zero_()
    mixture.bias.zero_()
    mixture.run(torch.randn(5, plan.hidden, device="cuda").bfloat16())
    assert mixture.chosen_RT[:5].tolist() == [list(range(plan.top))] * 5
    assert torch.allclose(mixture.weights_RT[:5], torch.tensor(plan.scaling / plan.top, device="cuda"))
    mixture.gate.copy_(gate)
    mixture.bias.copy_(bias)


def test_a_row_is_the_same_bits_beside_any_neighbours(built):
    mixture, _ = built
    x = torch.randn(MAX_ROWS, mixture.plan.hidden, device="cuda").bfloat16()
    together = mixture.run(x).clone()
    for rows in ([3], [0, 7], [6, 3, 1], [1, 2, 3, 4, 5]):
        assert torch.equal(mixture.run(x[rows].contiguous()), together[rows])


def test_rows_that_share_all_experts(built):
    mixture, _ = built
    plan = mixture.plan
    one = torch.randn(1, plan.hidden, device="cuda").bfloat16()
    out = mixture.run(one.expand(MAX_ROWS, -1).contiguous()).clone()
    assert torch.equal(out, out[:1].expand_as(out))
    mixture.check()


def test_ten_thousand_replays_repeat_bit_for_bit(built):
    mixture, _ = built
    x = torch.randn(6, mixture.plan.hidden, device="cuda").bfloat16()
    mixture.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture.run(x)
    graph.replay()
    first, wrong = out.clone(), torch.zeros((), dtype=torch.long, device="cuda")
    for replay in range(10_000):
        if replay % 1000 == 0:
            poison(mixture)
        graph.replay()
        wrong += (out != first).sum()
    assert wrong.item() == 0
    mixture.check()
