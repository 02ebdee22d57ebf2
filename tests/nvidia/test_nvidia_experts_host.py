"""Routed experts: what a CPU can check of layout, plan, reference and compilation."""

from __future__ import annotations

import re

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import experts_reference as reference
from lowlat_nvidia.deepseek_v4.experts import pack_first, pack_second
from lowlat_nvidia.deepseek_v4.experts_plan import (
    BLOCK_SHARED_BYTES,
    PAIR_BYTES,
    SUM_THREADS,
    THREADS,
    WARPS,
    ExpertsPlan,
    ExpertsPlanError,
)

SMALL = ExpertsPlan(hidden=1024, inner=128, experts=32, top=3)


def products(packed: torch.Tensor, x: torch.Tensor, tiles: int, warps: int, pairs: int) -> torch.Tensor:
    """[tiles, 16] sums as the lanes of the matrix instructions compute them from packed bytes; x is [inputs]."""
    parts = packed.view(tiles, warps, pairs * PAIR_BYTES)
    words = parts[..., : pairs * 512].contiguous().view(torch.int32)
    words = words.reshape(tiles, warps, pairs, 8, 4, 2, 2).long() & 0xFFFFFFFF  # ..., g, q, group, half
    scales = parts[..., pairs * 512 :].reshape(tiles, warps, pairs, 8, 2, 2)  # ..., g, group, half
    inputs = x.view(warps, pairs, 2, 4, 4, 2)  # warp, pair, group, q, pair of inputs, first or second
    every = 0x8E008E00
    operands = (  # as fp4_to_half unpacks them
        words & every,
        words << 3 & every,
        (words & 0x40384038) * ((1 << 6) + (1 << 1)) & every,
        (words & 0x20072007) * ((1 << 9) + (1 << 2)) & every,
    )
    sums = torch.zeros(tiles, 2, 8)
    for pair, operand in enumerate(operands):
        for place in (0, 1):
            half = (operand >> 16 * place & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.float16).float() * 2**14
            sums += torch.einsum(
                "twpgqsh,wpsq,twpgsh->thg", half, inputs[..., pair, place], torch.exp2(scales.float() - 127)
            )
    return sums.reshape(tiles, 16)


def test_lanes_multiply_the_weights_they_should():
    torch.manual_seed(0)
    weights = reference.random_experts(2, SMALL.hidden, SMALL.inner, "cpu")
    x, y = torch.randn(SMALL.hidden), torch.randn(SMALL.inner)
    tiles = SMALL.inner // 8
    first = products(pack_first(SMALL, weights, 1), x, tiles, WARPS, SMALL.first_pairs)
    gate = reference.dequantise(weights.w1[1], weights.w1_scale[1]) @ x
    up = reference.dequantise(weights.w3[1], weights.w3_scale[1]) @ x
    torch.testing.assert_close(first[:, :8].flatten(), gate, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first[:, 8:].flatten(), up, rtol=1e-4, atol=1e-4)
    second = products(pack_second(SMALL, weights, 1), y, SMALL.hidden // 16, 1, SMALL.second_pairs)
    down = reference.dequantise(weights.w2[1], weights.w2_scale[1]) @ y
    torch.testing.assert_close(second.flatten(), down, rtol=1e-4, atol=1e-4)


def test_sizes_of_packed_experts():
    weights = reference.random_experts(1, SMALL.hidden, SMALL.inner, "cpu")
    assert pack_first(SMALL, weights, 0).numel() == SMALL.first_bytes
    assert pack_second(SMALL, weights, 0).numel() == SMALL.second_bytes
    headline = ExpertsPlan()
    # 0.5 byte a weight and a byte of scale for 32.
    assert headline.first_bytes == 2 * 576 * 5120 * 17 // 32
    assert headline.first_bytes + headline.second_bytes == 4_700_160
    assert headline.shared_bytes <= BLOCK_SHARED_BYTES


def test_a_plan_refuses_with_every_reason():
    with pytest.raises(ExpertsPlanError, match=r"hidden 1000.*inner 100.*experts 33.*top 0"):
        ExpertsPlan(hidden=1000, inner=100, experts=33, top=0)


def test_quantisation_keeps_what_fits_and_rounds_to_powers_of_two():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 40] = 448.0, 1.0, 449.0
    got = reference.quantise(x)
    assert got[0, 0] == 448.0
    assert got[0, 1] == 1.0
    assert got[0, 40] == 448.0  # the scale is 2, and 224.5 rounds to 224
    for _ in range(20):
        x = torch.randn(3, 96) * 10 ** torch.randint(-6, 4, (1,)).item()
        largest = x.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        assert ((reference.quantise(x) - x).unflatten(-1, (-1, 32)).abs() <= largest / 16).all()


def test_choice_prefers_the_lowest_number_and_leaves_the_bias_out_of_weights():
    logits, bias = torch.zeros(2, 8), torch.zeros(8)
    logits[1, 5] = 1.0
    bias[6] = 0.5
    chosen, weights = reference.choose(logits, bias, 3, 1.5)
    assert chosen.tolist() == [[6, 0, 1], [6, 5, 0]]
    assert weights[0].tolist() == pytest.approx([0.5, 0.5, 0.5])
    torch.testing.assert_close(weights.sum(-1), torch.full((2,), 1.5))


@pytest.mark.parametrize("plan", [ExpertsPlan(), SMALL], ids=str)
def test_the_kernels_compile_without_spills(plan):
    pytest.importorskip("cuda.bindings.nvrtc")
    from lowlat_nvidia.jit import compile_cubin

    _, log = compile_cubin("experts.cu", plan.definitions(), cache=False, verbose=True)
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == 3
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    registers = [(int(found) + 7) // 8 * 8 for found in re.findall(r"Used (\d+) registers", log)]
    of = dict(zip(names, registers, strict=True))
    assert of["experts_products"] * THREADS + of["experts_sum"] * SUM_THREADS <= 65536
