"""The output projection: what a CPU can check of layout, plan and compilation."""

from __future__ import annotations

import pytest
import torch

from lowlat_nvidia.comm.output_projection import OutputDeadlineError, OutputPlan, OutputProjection, pack_projection


def test_lanes_multiply_the_weights_they_should():
    torch.manual_seed(0)
    weight = torch.randn(64, 1024).to(torch.float8_e4m3fn)
    x = torch.randn(1024)
    packed = pack_projection(weight).view(torch.float8_e4m3fn).float()
    packed = packed.view(8, 16, 8, 4, 2, 2, 4)[..., [1, 3, 0, 2]]  # tile, pair, g, q, group, word, byte as unpacked
    products = torch.einsum("tpgqswj,psqwj->tg", packed, x.view(16, 2, 4, 2, 4)).flatten()
    torch.testing.assert_close(products, weight.float() @ x, rtol=1e-4, atol=1e-4)


def test_plans():
    plan = OutputPlan()
    assert plan.block_tiles == 5
    assert plan.inbox_bytes == 2 * 4 * 8 * 5120 * 4
    with pytest.raises(ValueError, match="inputs 100"):
        OutputPlan(inputs=100)
    with pytest.raises(ValueError, match="shared memory"):
        OutputPlan(inputs=4096, blocks=64)


def test_an_error_word_is_named():
    OutputProjection.explain(0)
    with pytest.raises(OutputDeadlineError, match="rank 3 gave up waiting for another rank's tiles"):
        OutputProjection.explain(1 + 3 * 16 + 2)


def test_the_kernels_compile_without_spills():
    pytest.importorskip("cuda.bindings.nvrtc")
    from lowlat_nvidia.jit import compile_cubin

    _, log = compile_cubin("output_projection.cu", OutputPlan().definitions(), cache=False, verbose=True)
    assert log.count("0 bytes spill stores, 0 bytes spill loads") == 3
