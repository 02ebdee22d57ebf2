"""Checks of the attention of a few new rows of each request, under Triton's interpreter, in float32.

test_kernels_interpreted.py runs them in a process of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from row_cases import REQUESTS, SHAPES, RowCase, Shape, check_new_rows

from lowlat.bench.region_arms import OPERATIONS
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.device_step import RowSegments
from lowlat.layers.triton.row_attention import RowShape, row_attend
from lowlat.layers.triton_ops import EVERY, TritonOps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("before", "rows"), REQUESTS)
def test_new_rows(shape, before, rows):
    rows = [max(1, shape.width - 2 + new) if new else 0 for new in rows]
    # Few splits of many tokens, or many of few.
    programs = 2 if before[0] == 331 else 40
    check_new_rows(RowCase(shape, before, rows), programs=programs, tolerance=2e-5)


EDGES = [0, 32, 64, 65, 96, 97, 170, 9]
"""Tokens before a step. The last request is padding."""


@pytest.mark.parametrize("shape", [SHAPES[9], Shape(1, 4, 1, 24, 16), Shape(1, 4, 1, 16, 32)], ids=str)
def test_loops_without_masks(shape):
    """Few splits of whole and broken tiles, or many; tiles of 32 tokens."""
    case = RowCase(shape, EDGES, [1] * (len(EDGES) - 1) + [0])
    default = RowShape.of(shape.heads // shape.kv_heads, 1, shape.dim, 4, shape.page, 0)
    lean = msgspec.structs.replace(default, lean=True)
    assert not default.lean
    for programs in (2, 8):
        results = []
        for formed in (default, lean):
            mine = case.moved()
            (batch,) = mine.step.segments
            out = mine.qkv_RYD.new_full((len(mine.qkv_RYD), shape.heads * shape.dim), float("nan"))
            row_attend(
                mine.qkv_RYD, mine.keys_SKD, mine.values_SKD, mine.step, batch, mine.tables, mine.norms, mine.rule, out,
                programs=programs, shape=formed,
            )  # fmt: skip
            assert out.isfinite().all()
            results.append((out, mine.keys_SKD.nan_to_num(9e9), mine.values_SKD.nan_to_num(9e9)))
        assert all(map(torch.equal, *results))


def test_a_row_is_the_same_bits_beside_any_neighbours():
    shape, ops = SHAPES[0], TritonOps(20)
    ops.row_attention = EVERY
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


def test_one_row_is_the_same_bits_beside_any_requests_and_chunks():
    """Padding as decode steps have it: a row that no request has, of length 0."""
    shape, ops = Shape(1, 6, 2, 16, 16, norms=True), TritonOps(20)
    ops.one_row_attention = EVERY
    together = RowCase(shape, [300, 17, 90, 40], [1, 1, 1, 0])
    batch = together.step.segments[0]
    batch.rows_B.fill_(1)
    batch.tight = False
    expected = together.moved().run(ops)
    assert not expected[3].any()
    torch.testing.assert_close(expected, together.moved().run(ReferenceOps()), rtol=2e-5, atol=2e-5)

    def part(first: int, last: int) -> RowSegments:
        fields = (getattr(batch, name)[first:last] for name in ("slots_B", "first_B", "rows_B", "lengths_B"))
        return RowSegments(*fields, most_rows=1, longest=301)

    beside = together.moved()
    beside.step.segments = [msgspec.structs.replace(part(0, 1), most_rows=8), part(1, 4)]
    mixed = beside.run(ops)
    assert torch.equal(mixed[1:], expected[1:])
    assert not torch.equal(mixed[0], expected[0]), "a chunk's rows have the other kernels"
    torch.testing.assert_close(mixed[0], expected[0], rtol=2e-5, atol=2e-5)

    alone = together.moved()
    alone.step.segments = [part(2, 3)]
    assert torch.equal(alone.run(ops)[2], expected[2])


def test_other_steps_go_the_other_way():
    ops = TritonOps(4)
    ops.row_attention = EVERY
    case = RowCase(SHAPES[0], [20], [7])
    kernels = case.moved().run(ops)
    case.step.segments[0].tight = False
    torch.testing.assert_close(case.moved().run(ops), kernels, rtol=2e-5, atol=2e-5)
    assert not torch.equal(case.moved().run(ops), kernels)


@pytest.mark.parametrize(("most", "expected"), [(EVERY, ["row_attend"]), (0, ["rope_write", "attend"])])
def test_regions_see_the_operations(most, expected):
    """`lowlat bench regions` marks operations by their names."""
    ops, seen = TritonOps(4), []
    ops.row_attention = most

    def mark(name: str, whole: Callable[..., Any]) -> None:
        def marked(*args: Any) -> Any:
            seen.append(name)
            return whole(*args)

        setattr(ops, name, marked)

    for name in sorted(set(OPERATIONS) & {"attend", "row_attend", "rope_write"}):
        mark(name, getattr(ops, name))
    RowCase(SHAPES[0], [20], [7]).moved().run(ops)
    assert seen == expected
