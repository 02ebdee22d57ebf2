"""The attention chain: what a CPU can check of layout, plan, formats and compilation."""

from __future__ import annotations

import re

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import ChainPlan, pack_product


def test_lanes_multiply_the_weights_they_should():
    torch.manual_seed(0)
    weight = torch.randn(48, 128).to(torch.float8_e4m3fn)
    x = torch.randn(128)
    packed = pack_product(weight).view(torch.float8_e4m3fn).float()
    packed = packed.view(3, 4, 8, 4, 2, 2, 4)[..., [1, 3, 0, 2]]  # tile, group, g, q, half, word, byte as unpacked
    products = torch.einsum("tsgqhwj,sqwj->thg", packed, x.view(4, 4, 2, 4)).flatten()
    torch.testing.assert_close(products, weight.float() @ x, rtol=1e-4, atol=1e-4)


def test_plans():
    assert ChainPlan().weight_bytes == 1280 * 5120 + 512 * 5120 + 8192 * 1280 + 2048 * 4096
    for wrong in ({"hidden": 5000}, {"latent": 100}, {"groups": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
            ChainPlan(**wrong)


def test_a_region_of_the_reference_attends_to_its_own_keys():
    torch.manual_seed(1)
    plan = ChainPlan(hidden=256, latent=256, groups=2, group_outputs=32)
    weights, inputs = reference.random_weights(plan, "cpu"), reference.random_inputs(plan, 3, "cpu")
    out, data, scales = reference.attention_region(weights, inputs, 2, 1e-20)
    assert out.shape == (3, 64)
    assert out.isfinite().all()
    own, own_scales = reference._window_entry(inputs, int(inputs.window_RW[1, -1]))
    assert torch.equal(own, data[1])
    assert torch.equal(own_scales, scales[1])
    # The second row's last but one entry is the first row's own.
    assert inputs.window_RW[1, -2] == inputs.window_RW[0, -1]


def test_rotation_back_undoes_rotation():
    angle = torch.rand(2, 32)
    angles = torch.stack((angle.cos(), angle.sin()), 1)
    x = torch.randn(2, 3, 512)
    there = reference._rotate(x, angles, 1.0)
    assert torch.equal(there[..., :448], x[..., :448])
    torch.testing.assert_close(reference._rotate(there, angles, -1.0), x, rtol=1e-5, atol=1e-5)


def test_the_kernels_spill_little():
    """Two blocks of different kernels share a multiprocessor, so registers are bounded and a few values may spill."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from lowlat_nvidia.jit import compile_cubin

    small = ChainPlan(hidden=1024, latent=256, groups=2, group_outputs=128)
    _, log = compile_cubin("attention_chain.cu", small.definitions(), cache=False, verbose=True)
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    assert len(spilled) == 4
    assert max(spilled) <= 256
