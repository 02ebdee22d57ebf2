"""How far from exact sums the attention region may be: Hopper's matrix instruction cuts products of FP8 off.

By what is published about it, it brings the 32 products of a group to the largest one's exponent, keeps 13 bits behind
the point, and gives a sum of so many bits, too. A part of 2^-13 is little, but two steps make more of it. A value that
crosses a border of FP8 moves by 1/16 to 1/8 of itself: relative to the norm, a difference of d becomes about the root
of d / 10. And where a row has one key, a head's 512 values are the weight of that key times eight mantissas: values of
one mantissa cross together or not at all, so that most inputs are close and a few are far.
"""

from __future__ import annotations

import copy

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import ChainPlan

BITS, FEW_KEYS_BOUND, BOUND = 13, 2.5e-2, 1.5e-2  # the bounds of test_nvidia_chain_gpu.py
EXACT = 8e-3  # the bound of test_nvidia_chain_emulated.py, where sums are exact


def cut(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    unit = torch.exp2((exponent - BITS).float())
    return torch.trunc(x / unit) * unit


def cut_product(x_RK: torch.Tensor, raw_OK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Products as the instruction is known to make them, one group of 32 inputs at a time."""
    weight = raw_OK.float().view(len(raw_OK), -1, 32)
    scales = scale.repeat_interleave(32, 0)
    rows = []
    for row in x_RK.view(len(x_RK), -1, 32):
        products = row * weight
        exponent = torch.frexp(products.abs().amax(-1, keepdim=True).clamp_min(2.0**-60)).exponent
        sums = cut(products, exponent - 1).sum(-1)
        sums = cut(sums, torch.frexp(sums.abs().clamp_min(2.0**-60)).exponent - 1)
        rows.append((sums * scales).double().sum(-1).float())
    return torch.stack(rows)


@pytest.mark.parametrize(("rows", "window", "chosen", "bound"), [(1, 1, 0, FEW_KEYS_BOUND), (2, 40, 77, BOUND)])
def test_bounds_are_what_cut_products_come_to(rows: int, window: int, chosen: int, bound: float) -> None:
    plan = ChainPlan(hidden=2048, latent=512, groups=2, group_outputs=128)
    torch.manual_seed(2)
    weights = reference.random_weights(plan, "cpu")
    distances = []
    for seed in range(12 if chosen == 0 else 2):
        torch.manual_seed(seed)
        inputs = reference.random_inputs(plan, rows, "cpu", window=window, chosen=chosen)
        exact, data, _ = reference.attention_region(weights, copy.deepcopy(inputs), plan.groups, 1e-20)
        out, cut_data, _ = reference.attention_region(weights, inputs, plan.groups, 1e-20, cut_product)
        distances.append(((out - exact).norm() / exact.norm()).item())
        assert 0.97 < (cut_data == data).float().mean() < 1
    assert max(distances) < bound
    if chosen == 0:
        assert max(distances) > 2 * sorted(distances)[len(distances) // 2]  # values cross together, and seldom
        assert max(distances) > EXACT
