"""Random output projections for tests."""

from __future__ import annotations

import torch

from lowlat_nvidia.comm.output_projection import OutputPlan, Residual


def make_weights(plan: OutputPlan, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weights, block scales, and the float32 weights that they mean."""
    scale = torch.exp2(torch.randint(-8, -4, (plan.hidden // 32, plan.inputs // 32), device=device).float())
    raw = torch.randn(plan.hidden, plan.inputs, device=device).to(torch.float8_e4m3fn)
    return raw, scale, raw.float() * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)


def make_residual(plan: OutputPlan, rows: int, device: str) -> Residual:
    """Random streams and mixes."""
    return Residual(
        torch.randn(rows, 4, plan.hidden, device=device).bfloat16(),
        torch.rand(rows, 4, device=device) * 2,
        torch.rand(rows, 4, 4, device=device).softmax(-1),
        torch.rand(rows, 4, device=device),
        (torch.rand(plan.hidden, device=device) + 0.5).bfloat16(),
    )
