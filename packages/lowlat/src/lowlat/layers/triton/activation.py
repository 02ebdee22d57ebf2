"""Gated activations over packed gate and up columns.

Legend of shape suffixes: R rows, I intermediate (2I packed columns).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

# Elements of one program.
_BLOCK = 1024

KINDS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Activations that the kernel knows, by the name that config.json uses."""


@triton.jit
def activate(x, KIND: tl.constexpr):
    """An activation of float32 values; `KIND` is one of `KINDS`."""
    if KIND == 0:
        active = x / (1.0 + tl.exp(-x))
    else:
        # gelu's tanh form, with tanh(z) = 1 - 2 / (exp(2z) + 1).
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        active = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return active


@triton.jit
def gate_kernel(packed_ptr, out_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(packed_ptr + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + row * 2 * width + width + place, mask=inside, other=0.0)
    # Rounded before the product, as it is when the activation stands alone.
    rounded = activate(gate, KIND).to(up.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + place, (rounded * up.to(tl.float32)).to(up.dtype), mask=inside)


def gated(gate_up_RI: torch.Tensor, activation: str, *, early_start: bool = False) -> torch.Tensor:
    """activation(gate) * up, [R, I], of contiguous [R, 2I] with the gates first. `KeyError` for an unknown name."""
    rows, both = gate_up_RI.shape
    width = both // 2
    assert gate_up_RI.is_contiguous()
    out_RI = gate_up_RI.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _BLOCK))
    gate_kernel[grid](
        gate_up_RI, out_RI, width, KIND=KINDS[activation], BLOCK=_BLOCK, EARLY=early_start, num_warps=4,
        **early.launch_options(early_start),
    )  # fmt: skip
    return out_RI
