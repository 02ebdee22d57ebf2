"""Sums and picks that ranks push into each other's memory compile for a GPU that is not here."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements/triton.txt")

from compile_kit import compiled, resources


@pytest.mark.parametrize(("ranks", "width"), [(4, 4096), (4, 7168)])
def test_pushed_reduction_fits_and_keeps_words_whole(ranks, width, tmp_path):
    """Stores and looks are 8 bytes in one instruction each, visible to the whole system: a tag never parts from its
    data."""
    from lowlat.layers.triton import push_reduce

    block, rows, rank = push_reduce.block_words(width), 8, ranks - 1
    types = dict.fromkeys(["x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "tags_ptr", "alarm_ptr"], "*i32")
    types |= {"memories_ptr": "*i64", "eps": "fp32", "deadline_ns": "i64"}
    constants = push_reduce.constants(width, ranks, rank, rows, plain=False, early=True)
    warps = push_reduce.push_warps(block)
    kernel = compiled(push_reduce.push_reduce_norm_kernel, "sm_90", types, constants, num_warps=warps)
    registers, spilled, shared = resources(kernel, "sm_90", tmp_path)
    assert spilled <= (0 if width <= 4096 else 16)
    assert registers * 32 * warps <= 65536
    assert shared <= 16 * 1024
    text = kernel.asm["ptx"]
    words_each = block // (32 * warps)
    assert text.count("st.relaxed.sys.global.b64") == (ranks - 1) * words_each
    assert text.count("ld.relaxed.sys.global.b64") == (ranks - 1) * words_each
    assert "multimem" not in text
    assert text.count("griddepcontrol") == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_pushed_pick_fits(ranks, tmp_path):
    from lowlat.layers.triton import push_pick

    types = dict.fromkeys(["ids_ptr", "tags_ptr", "alarm_ptr"], "*i32") | {"best_ptr": "*fp32"}
    types |= dict.fromkeys(["slots_ptr", "tokens_ptr", "out_ptr", "memories_ptr"], "*i64")
    types |= {"parts": "i32", "first": "i32", "deadline_ns": "i64"}
    constants = push_pick.constants(ranks, 1, 256, 4096, plain=False, early=True) | {"BLOCK": 128}
    kernel = compiled(push_pick.push_pick_kernel, "sm_90", types, constants, num_warps=1)
    _, spilled, _ = resources(kernel, "sm_90", tmp_path)
    assert spilled == 0
    text = kernel.asm["ptx"]
    assert text.count("st.relaxed.sys.global.b64") == ranks - 1
    assert text.count("ld.relaxed.sys.global.b64") == ranks - 1
