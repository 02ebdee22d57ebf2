"""Experts with random weights, on any device; the kernels beside the same experts one by one."""

from __future__ import annotations

import torch

from lowlat.layers.activation import GATED, ClampedSwiglu
from lowlat.layers.moe import Experts, TopKRouter
from lowlat.layers.triton_ops import TritonOps
from lowlat.platform.cuda import CudaLinear


def random_experts(
    hidden: int, inner: int, count: int, kind: str, *, biases: bool, dtype: torch.dtype, device: torch.device | str
) -> Experts:
    def linear(outputs: int, inputs: int) -> CudaLinear:
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
        return CudaLinear(weight, torch.randn(outputs, device=device).to(dtype) if biases else None)

    activation = ClampedSwiglu(1.7, 0.8) if kind == "clamped" else GATED[kind]
    gate_up = [linear(2 * inner, hidden) for _ in range(count)]
    return Experts(gate_up, [linear(hidden, inner) for _ in range(count)], activation)


def check_experts(
    rows: int, hidden: int, inner: int, kind: str, *, biases: bool, dtype: torch.dtype, device: torch.device | str,
    tolerance: float, early_start: bool = False,
) -> None:  # fmt: skip
    experts = random_experts(hidden, inner, 5, kind, biases=biases, dtype=dtype, device=device)
    wide = Experts(
        *(
            [CudaLinear(one.weight_OI.double(), None if one.bias_O is None else one.bias_O.double()) for one in some]
            for some in (experts.gate_up, experts.down)
        ),
        experts.activation,
    )
    x_RH = torch.randn(rows, hidden, device=device).to(dtype)
    router = TopKRouter(torch.randn(5, hidden, device=device), None, 3, normalised=True)
    chosen_RA, weights_RA = router(x_RH)
    ops = TritonOps(processors=4, early_start=early_start)
    assert ops.finds_experts(experts, rows)
    result = ops.experts(x_RH, chosen_RA, weights_RA, experts)
    assert result.dtype == dtype
    expected = wide(x_RH.double(), chosen_RA, weights_RA.double())
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    # A row is the same bits beside any others.
    alone = ops.experts(x_RH[-1:].contiguous(), chosen_RA[-1:], weights_RA[-1:], experts)
    assert torch.equal(alone[0], result[-1])
