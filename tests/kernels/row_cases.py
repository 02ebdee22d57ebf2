"""Random inputs for the attention of a few new rows of each request, on any device, and plain PyTorch to compare with.

Slots that nobody may read hold NaN: those of tokens that a window has passed, and those that the rows are to write.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.device_step import DeviceStep, RowSegments
from lowlat.layers.rope import Rope
from lowlat.layers.triton import row_attention
from lowlat.layers.triton_ops import TritonOps


class Shape(NamedTuple):
    """What all requests of a case share."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    page: int
    window: int = 0
    sinks: bool = False
    norms: bool = False
    draft: bool = False


class RowCase:
    """A step of requests with `before` tokens in the cache and `rows` new ones, of a width's rows each."""

    def __init__(
        self, shape: Shape, before: list[int], rows: list[int], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(sum(before))

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        count, width = len(before), shape.width
        total = count * width
        lengths = [old + new if new else 0 for old, new in zip(before, rows, strict=True)]
        each = [-(-length // shape.page) for length in lengths]
        pages = sum(each) + 2  # one that holds NaN, and the padding page
        order = torch.randperm(sum(each), generator=generator).int()
        table = torch.full((count + 3, max(each) + 2), sum(each), dtype=torch.int32)
        slots = torch.randperm(count + 3, generator=generator)[:count]
        self.shape, self.real = shape, torch.zeros(total, dtype=torch.bool)
        self.positions_R = torch.zeros(total, dtype=torch.int64)
        self.places_R = torch.full((total,), (pages - 1) * shape.page)
        entries = (pages * shape.page + total, shape.kv_heads, shape.dim)
        self.keys_SKD, self.values_SKD = (torch.full(entries, float("nan"), dtype=dtype) for _ in range(2))
        for index, (old, new) in enumerate(zip(before, rows, strict=True)):
            own = table[slots[index]]
            own[: each[index]] = order[sum(each[:index]) : sum(each[: index + 1])]
            passed = max(0, old - shape.window + (0 if shape.draft else 1)) if shape.window else 0
            token = torch.arange(old + new)
            place = own[token // shape.page].long() * shape.page + token % shape.page
            for pool in (self.keys_SKD, self.values_SKD):
                pool[place[passed:old]] = random(max(0, old - passed), shape.kv_heads, shape.dim)
            first = index * width
            self.real[first : first + new] = True
            self.positions_R[first : first + new] = token[old:]
            self.places_R[first : first + new] = place[old:]
        self.base = pages * shape.page
        if shape.draft:
            self.places_R = self.base + torch.arange(total)
        self.qkv_RYD = random(total, shape.heads + 2 * shape.kv_heads, shape.dim)
        self.norms = (random(shape.dim), random(shape.dim), 1e-6) if shape.norms else None
        sinks = random(shape.heads) if shape.sinks else None
        self.rule = AttentionRule(scale=0.3 if shape.sinks else None, window=shape.window, sinks_N=sinks)
        self.tables = Rope(shape.dim, 10000.0, max(lengths) + 1, None, torch.device("cpu")).tables
        # A step of one row a request gives padding one too, of no tokens (`step.begin_decodes`).
        shares = torch.tensor(rows) if width > 1 else torch.ones(count)
        narrow = (slots, torch.arange(count) * width, shares, torch.tensor(lengths))
        segments = RowSegments(
            *(part.int() for part in narrow), most_rows=width, longest=max(lengths), tight=True
        )  # fmt: skip
        self.step = DeviceStep(
            self.positions_R, self.positions_R, self.places_R, [segments], table, shape.page, None,
            block_base=self.base if shape.draft else -1,
        )  # fmt: skip
        self.device = device

    def moved(self, dtype: torch.dtype | None = None, device: str | None = None) -> RowCase:
        """On its device, or another one and in another type."""
        device = device or self.device
        moved = object.__new__(RowCase)
        for name, value in vars(self).items():
            setattr(moved, name, _moved(value, dtype, device))
        return moved

    def run(self, ops: TritonOps | ReferenceOps) -> torch.Tensor:
        """Attention of all rows, [R, N * D]; writes to the pools."""
        return ops.rope_attend(
            self.qkv_RYD, self.keys_SKD, self.values_SKD, self.step, self.tables, self.norms, self.rule
        )


def _moved(value: object, dtype: torch.dtype | None, device: str) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device=device, dtype=dtype if dtype and value.is_floating_point() else value.dtype, copy=True)
    if isinstance(value, tuple) and not isinstance(value, Shape):
        return tuple(_moved(part, dtype, device) for part in value)
    if isinstance(value, list):
        return [_moved(part, dtype, device) for part in value]
    if isinstance(value, msgspec.Struct):
        parts = {name: _moved(getattr(value, name), dtype, device) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **parts)
    return value


def check_new_rows(case: RowCase, *, programs: int, tolerance: float, early_start: bool = False) -> None:
    """Results of real rows, and what lies in the cache afterwards."""
    shape = case.shape
    exact = case.moved(torch.float64, "cpu")
    expected = exact.run(ReferenceOps())[case.real]
    assert not expected.isnan().any()
    mine = case.moved()
    (batch,) = mine.step.segments
    assert row_attention.fits(batch, shape.heads, shape.kv_heads, shape.dim)
    got = mine.qkv_RYD.new_full((len(mine.qkv_RYD), shape.heads * shape.dim), float("nan"))
    row_attention.row_attend(
        mine.qkv_RYD, mine.keys_SKD, mine.values_SKD, mine.step, batch, mine.tables, mine.norms, mine.rule, got,
        programs=programs, early_start=early_start,
    )  # fmt: skip
    assert not got.cpu()[~case.real].any(), "padding does not give zeros"
    torch.testing.assert_close(got.cpu()[case.real].double(), expected, rtol=tolerance, atol=tolerance)
    written = case.places_R[case.real] if not shape.draft else case.places_R[:0]
    others = torch.ones(len(case.keys_SKD), dtype=torch.bool).index_fill_(0, written, False)
    for name in ("keys_SKD", "values_SKD"):
        before, after, wanted = (getattr(of, name).cpu() for of in (case, mine, exact))
        assert torch.equal(before[others].nan_to_num(9e9), after[others].nan_to_num(9e9)), "another slot was written"
        torch.testing.assert_close(after[written].double(), wanted[written], rtol=tolerance, atol=tolerance)


SHAPES = [
    Shape(7, 9, 3, 16, 16),
    Shape(1, 4, 2, 16, 16, window=40, norms=True),
    Shape(2, 4, 2, 8, 7, sinks=True),
    Shape(8, 4, 1, 24, 16, norms=True),
    Shape(5, 3, 3, 16, 5, window=40, sinks=True),
    Shape(4, 6, 2, 16, 16, window=3),
    Shape(6, 6, 2, 16, 7, norms=True, draft=True),
    Shape(3, 2, 1, 16, 16, window=20, draft=True),
    Shape(8, 4, 2, 16, 4, window=300),
    Shape(1, 6, 2, 16, 1),
    Shape(1, 5, 1, 24, 16, window=97, sinks=True, norms=True),
]
REQUESTS = [
    # tokens in the cache, new rows
    ([70], [2]),
    ([0, 1, 63, 64, 65], [2, 1, 2, 2, 0]),
    ([331, 5], [1, 2]),
]
