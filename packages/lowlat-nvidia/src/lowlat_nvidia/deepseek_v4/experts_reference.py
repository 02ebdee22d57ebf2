"""Routed experts in plain PyTorch, after the formulas of DeepSeek-V4.1.

Suffixes: R rows, H hidden, I inner, E experts, T experts a row, O outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowlat_nvidia.formats import fp4_values, quantise


@dataclass(slots=True)
class ExpertWeights:
    """As checkpoints hold them: two codes a byte, the low half first; scales are powers of two, 2^(byte - 127), for 32
    inputs. w1 and w3 [E, I, H / 2] uint8 with scales [E, I, H / 32]; w2 [E, H, I / 2] with scales [E, H, I / 32].
    """

    w1: Tensor
    w1_scale: Tensor
    w3: Tensor
    w3_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


def random_experts(experts: int, hidden: int, inner: int, device: str) -> ExpertWeights:
    """Random codes; scales between 2^-9 and 2^-6, so that results have ordinary sizes."""

    def codes(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        packed = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        scale = torch.randint(118, 122, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
        return packed, scale

    return ExpertWeights(*codes(inner, hidden), *codes(inner, hidden), *codes(hidden, inner))


def dequantise(packed_OK: Tensor, scale: Tensor) -> Tensor:
    """Float32 weights [O, K] of one expert."""
    return fp4_values(packed_OK) * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


def choose(logits_RE: Tensor, bias_E: Tensor, top: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts [R, T], best first, ties by the lowest number, and their weights [R, T] float32."""
    scores = F.softplus(logits_RE.float()).sqrt()
    order = (scores + bias_E).sort(stable=True, dim=-1, descending=True).indices[:, :top]
    chosen = scores.gather(-1, order)
    return order, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def expert(x_RH: Tensor, weights: ExpertWeights, number: int, limit: float) -> Tensor:
    """One expert's output [R, H] float32."""
    x = quantise(x_RH)
    gate = (x @ dequantise(weights.w1[number], weights.w1_scale[number]).T).clamp(max=limit)
    up = (x @ dequantise(weights.w3[number], weights.w3_scale[number]).T).clamp(-limit, limit)
    return quantise(F.silu(gate) * up) @ dequantise(weights.w2[number], weights.w2_scale[number]).T


def routed(x_RH: Tensor, weights: ExpertWeights, chosen_RT: Tensor, weights_RT: Tensor, limit: float) -> Tensor:
    """The weighted sum of the chosen experts [R, H] float32, experts one by one."""
    out = torch.zeros(x_RH.shape, dtype=torch.float32, device=x_RH.device)
    for number in sorted(set(chosen_RT.flatten().tolist())):
        row, place = (chosen_RT == number).nonzero(as_tuple=True)
        out[row] += weights_RT[row, place, None] * expert(x_RH[row], weights, number, limit)
    return out
