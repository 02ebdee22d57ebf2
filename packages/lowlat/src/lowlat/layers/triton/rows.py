"""Rows looked up, and rows added: small kernels that let those around them overlap (see `early`).

Legend of shape suffixes: R rows, H hidden, V rows of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous


@triton.jit
def look_up_kernel(places_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        # In this order: kernels behind a step's look-up rely on all before it being done (`row_attention`).
        wait_for_previous()
        let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.load(places_ptr + row)
    tl.store(out_ptr + row * width + column, tl.load(table_ptr + place * width + column, mask=inside), mask=inside)


@triton.jit
def add_rows_kernel(x_ptr, y_ptr, out_ptr, width, out_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        wait_for_previous()
        let_next_start()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + row * width + column, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, (x + y).to(out_ptr.dtype.element_ty), mask=inside)


def look_up(places_R: torch.Tensor, table_VH: torch.Tensor, *, early_start: bool = False) -> torch.Tensor:
    """Rows [R, H] of a table; `places_R` int64."""
    width = table_VH.shape[1]
    assert places_R.is_contiguous()
    assert table_VH.is_contiguous()
    out_RH = torch.empty(len(places_R), width, dtype=table_VH.dtype, device=table_VH.device)
    look_up_kernel[(len(places_R), triton.cdiv(width, 1024))](
        places_R, table_VH, out_RH, width, BLOCK=1024, EARLY=early_start, num_warps=4,
        **early.launch_options(early_start),
    )  # fmt: skip
    return out_RH


def add_rows(x_RH: torch.Tensor, y_RH: torch.Tensor, out_RH: torch.Tensor, *, early_start: bool = False) -> None:
    """Write the sum to `out_RH`, whose rows may lie apart."""
    rows, width = x_RH.shape
    assert x_RH.is_contiguous()
    assert y_RH.is_contiguous()
    assert out_RH.stride(1) == 1
    add_rows_kernel[(rows, triton.cdiv(width, 1024))](
        x_RH, y_RH, out_RH, width, out_RH.stride(0), BLOCK=1024, EARLY=early_start, num_warps=4,
        **early.launch_options(early_start),
    )  # fmt: skip
