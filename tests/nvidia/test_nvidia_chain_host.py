"""The attention chain: what a CPU can check of layout, plan, formats and compilation."""

from __future__ import annotations

import re

import pytest
import torch

from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import THREADS, ChainPlan, pack_product


def test_weights_lie_as_the_matrix_instruction_reads_them():
    weight = torch.randn(128, 96).to(torch.float8_e4m3fn)
    packed = pack_product(weight).view(2, 3, 2, 8, 8, 16)  # tile, group, half, unit, output, input
    raw = weight.view(torch.uint8)
    for output, k in ((0, 0), (7, 15), (77, 33), (127, 95), (64, 48)):
        place = (output // 64, k // 32, k % 32 // 16, output % 64 // 8, output % 8, k % 16)
        assert packed[place] == raw[output, k]


def test_plans():
    assert ChainPlan().weight_bytes == 1280 * 5120 + 512 * 5120 + 8192 * 1280 + 2048 * 4096
    for wrong in ({"hidden": 5000}, {"latent": 100}, {"groups": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
            ChainPlan(**wrong)


def test_a_region_of_the_reference_attends_to_its_own_keys():
    torch.manual_seed(1)
    plan = ChainPlan(hidden=256, latent=256, groups=2, group_outputs=64)
    weights, inputs = reference.random_weights(plan, "cpu"), reference.random_inputs(plan, 3, "cpu")
    out, data, scales = reference.attention_region(weights, inputs, 2, 1e-20)
    assert out.shape == (3, 128)
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


def test_kernels_of_two_stages_fit_one_multiprocessor():
    """A kernel can start while the one before it runs only where registers and shared memory hold both."""
    shared = ChainPlan().shared()
    available = 228 * 1024
    for first, second in (("down", "up"), ("up", "attend"), ("attend", "group"), ("group", "down")):
        assert shared[first] + shared[second] + 2 * 1024 <= available, (first, second)


def test_registers_hold_two_kernels_at_once():
    pytest.importorskip("cuda.bindings.nvrtc")
    from lowlat_nvidia.jit import compile_cubin

    _, log = compile_cubin("attention_chain.cu", ChainPlan().definitions(), cache=False, verbose=True)
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    registers = [(int(found) + 7) // 8 * 8 for found in re.findall(r"Used (\d+) registers", log)]
    assert len(names) == len(spilled) == len(registers) == 4
    assert max(spilled) <= 16
    assert sum(sorted(registers)[2:]) * THREADS <= 65536
    of = dict(zip(names, registers, strict=True))
    assert 2 * of["group_project"] * THREADS <= 65536
    assert (of["group_project"] + of["attend"]) * THREADS <= 65536


def test_two_blocks_of_the_grouped_projection_fit_where_it_is_not_alone():
    available, shared = 228 * 1024, ChainPlan().shared()
    assert 2 * (shared["group"] + 1024) > available
    assert 2 * (shared["group_beside"] + 1024) <= available
    assert shared["group_beside"] + shared["attend"] + 2 * 1024 <= available
