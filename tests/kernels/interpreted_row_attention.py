"""Checks of the attention of a few new rows of each request, under Triton's interpreter, in float32.

test_kernels_interpreted.py runs them in a process of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

import pytest
import torch
from row_cases import REQUESTS, SHAPES, RowCase, check_new_rows

from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.triton_ops import TritonOps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("before", "rows"), REQUESTS)
def test_new_rows(shape, before, rows):
    rows = [max(1, shape.width - 2 + new) if new else 0 for new in rows]
    # Few splits of many tokens, or many of few.
    programs = 2 if before[0] == 331 else 40
    check_new_rows(RowCase(shape, before, rows), programs=programs, tolerance=2e-5)


def test_a_row_is_the_same_bits_beside_any_neighbours():
    shape, ops = SHAPES[0], TritonOps(20)
    ops.row_attention = True
    together = RowCase(shape, [300, 17, 90], [7, 5, 7])
    alone = RowCase(shape, [90], [7])
    alone.qkv_RYD = together.qkv_RYD[14:].clone()
    table, slot = together.step.table_TP, together.step.segments[0].slots_B[2:]
    for name in ("keys_SKD", "values_SKD"):
        setattr(alone, name, getattr(together, name).clone())
    alone.step.table_TP, alone.step.segments[0].slots_B = table, slot
    alone.step.write_slots_R = together.step.write_slots_R[14:].clone()
    expected = together.moved().run(ops)
    assert torch.equal(alone.moved().run(ops), expected[14:])
    assert not torch.equal(expected[14:], together.moved().run(ReferenceOps())[14:]), "not the kernels"
    assert expected[together.real].isfinite().all()


def test_other_steps_go_the_other_way():
    ops = TritonOps(4)
    ops.row_attention = True
    case = RowCase(SHAPES[0], [20], [7])
    kernels = case.moved().run(ops)
    case.step.segments[0].tight = False
    torch.testing.assert_close(case.moved().run(ops), kernels, rtol=2e-5, atol=2e-5)
    assert not torch.equal(case.moved().run(ops), kernels)
