"""Experts of few rows: each row's chosen experts are found on the device, so a step with them can be captured.

Weights stay where they are, one tensor an expert; a table holds their addresses. What is computed follows from the
router's choice alone, and experts of one row are added in its order.

Legend of shape suffixes: R rows, A experts a row, E experts, H hidden, I intermediate part of this rank.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl

from lowlat.layers.triton import early
from lowlat.layers.triton.activation import activate
from lowlat.layers.triton.product import ProductShape

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

MOST_ROWS = 64
"""Rows up to which every choice reads its expert for itself."""


def fits(weight_OI: torch.Tensor) -> bool:
    """Whether the kernels can hold such a weight's rows."""
    outputs, width = weight_OI.shape
    return ProductShape.of(outputs, width, weight_OI.element_size(), gated=True) is not None


class ExpertTable(msgspec.Struct, frozen=True):
    """Addresses of one product's weights and biases, int64 [E]; 0: no bias."""

    weights_E: torch.Tensor
    biases_E: torch.Tensor | None
    outputs: int
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> ExpertTable:
        """Of tensors that live as long as the table is used, all of one shape [outputs, inputs]."""
        assert all(weight.is_contiguous() for weight in weights)
        device = weights[0].device
        given = [bias for bias in biases if bias is not None]
        addresses = torch.tensor([weight.data_ptr() for weight in weights], device=device)
        places = torch.tensor([bias.data_ptr() for bias in given], device=device) if given else None
        assert len(given) in (0, len(weights))
        outputs, inputs = weights[0].shape
        return cls(addresses, places, outputs, inputs, weights[0].dtype)


@triton.jit
def _expert_sums(
    weight_ptr, bias_ptr, x_k, place_n, place_k, outputs, skipped, WIDTH: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Products of one row with rows `place_n` + `skipped` of a weight of x's type."""
    tile = (place_n < outputs)[:, None] & (place_k < WIDTH)[None, :]
    offset = (place_n + skipped).to(tl.int64)[:, None] * WIDTH + place_k[None, :]
    weight = tl.load(weight_ptr + offset, mask=tile, other=0.0)
    result_n = tl.sum(weight.to(tl.float32) * x_k.to(tl.float32)[None, :], axis=1)
    if BIAS:
        result_n += tl.load(bias_ptr + skipped + place_n, mask=place_n < outputs, other=0.0).to(tl.float32)
    return result_n


@triton.jit
def expert_gate_kernel(
    x_ptr, experts_ptr, weights_ptr, biases_ptr, out_ptr, outputs, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Gate and up of one choice: activation(gate) times up, for a few intermediate features."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    choice = tl.program_id(1)
    place_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place_k = tl.arange(0, BLOCK_K)
    kind = x_ptr.dtype.element_ty
    expert = tl.load(experts_ptr + choice)
    weight_ptr = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(kind)), 16)
    bias_ptr = weight_ptr
    if BIAS:
        bias_ptr = tl.load(biases_ptr + expert).to(tl.pointer_type(kind))
    x_k = tl.load(x_ptr + choice // CHOSEN * WIDTH + place_k, mask=place_k < WIDTH, other=0.0)
    gate_n = _expert_sums(weight_ptr, bias_ptr, x_k, place_n, place_k, outputs, 0, WIDTH, BIAS)
    up_n = _expert_sums(weight_ptr, bias_ptr, x_k, place_n, place_k, outputs, outputs, WIDTH, BIAS)
    if KIND < 2:
        result_n = activate(gate_n, KIND) * up_n
    else:
        gate_n = tl.minimum(gate_n, LIMIT)
        up_n = tl.minimum(tl.maximum(up_n, -LIMIT), LIMIT)
        result_n = gate_n / (1.0 + tl.exp(-ALPHA * gate_n)) * (up_n + 1.0)
    tl.store(out_ptr + choice.to(tl.int64) * outputs + place_n, result_n.to(kind), mask=place_n < outputs)


@triton.jit
def expert_down_kernel(
    x_ptr, experts_ptr, shares_ptr, weights_ptr, biases_ptr, out_ptr, outputs, CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A few hidden features of one row: its experts' results times their weights, summed in the router's order."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(1)
    place_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place_k = tl.arange(0, BLOCK_K)
    kind = x_ptr.dtype.element_ty
    total_n = tl.zeros([BLOCK_N], tl.float32)
    for turn in range(CHOSEN):
        choice = row * CHOSEN + turn
        expert = tl.load(experts_ptr + choice)
        weight_ptr = tl.multiple_of(tl.load(weights_ptr + expert).to(tl.pointer_type(kind)), 16)
        bias_ptr = weight_ptr
        if BIAS:
            bias_ptr = tl.load(biases_ptr + expert).to(tl.pointer_type(kind))
        x_k = tl.load(x_ptr + choice.to(tl.int64) * WIDTH + place_k, mask=place_k < WIDTH, other=0.0)
        result_n = _expert_sums(weight_ptr, bias_ptr, x_k, place_n, place_k, outputs, 0, WIDTH, BIAS)
        total_n += result_n * tl.load(shares_ptr + choice)
    tl.store(out_ptr + row.to(tl.int64) * outputs + place_n, total_n.to(kind), mask=place_n < outputs)


def experts(
    x_RH: torch.Tensor,
    experts_RA: torch.Tensor,
    weights_RA: torch.Tensor,
    gate_up: ExpertTable,
    down: ExpertTable,
    activation: tuple[int, float, float],
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """Weighted sums over each row's experts, [R, H], in the type of `x_RH`, which is the weights'.

    `experts_RA`: int64; `weights_RA`: float32. `activation`: 0 silu, 1 gelu's tanh form, 2 the clamped one with its
    alpha and limit.
    """
    rows, chosen = experts_RA.shape
    inner = gate_up.outputs // 2
    kind, alpha, limit = activation
    assert x_RH.is_contiguous()
    assert x_RH.dtype == gate_up.dtype == down.dtype
    first = ProductShape.of(inner, gate_up.inputs, x_RH.element_size(), gated=True)
    second = ProductShape.of(down.outputs, down.inputs, x_RH.element_size(), gated=False)
    assert first is not None
    assert second is not None
    options = {"CHOSEN": chosen, "EARLY": early_start, **early.launch_options(early_start)}
    active_XI = x_RH.new_empty(rows * chosen, inner)
    chosen_RA = experts_RA.contiguous()
    biases = gate_up.weights_E if gate_up.biases_E is None else gate_up.biases_E
    expert_gate_kernel[(triton.cdiv(inner, first.block_n), rows * chosen)](
        x_RH, chosen_RA, gate_up.weights_E, biases, active_XI, inner, WIDTH=gate_up.inputs, KIND=kind, ALPHA=alpha,
        LIMIT=limit, BIAS=gate_up.biases_E is not None, BLOCK_N=first.block_n, BLOCK_K=first.block_k,
        num_warps=first.warps, **options,
    )  # fmt: skip
    out_RH = x_RH.new_empty(rows, down.outputs)
    biases = down.weights_E if down.biases_E is None else down.biases_E
    expert_down_kernel[(triton.cdiv(down.outputs, second.block_n), rows)](
        active_XI, chosen_RA, weights_RA.contiguous(), down.weights_E, biases, out_RH, down.outputs,
        WIDTH=down.inputs, BIAS=down.biases_E is not None, BLOCK_N=second.block_n, BLOCK_K=second.block_k,
        num_warps=second.warps, **options,
    )  # fmt: skip
    return out_RH
