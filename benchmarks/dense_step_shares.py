"""Arms of dense_step_arms.py --forms in which blocks work by their multiprocessors' shares of the memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.pace import Paces
from lowlat_nvidia.dense.shares import Shares, alike
from lowlat_nvidia.dense.step import DenseStep, load_kernels

ARMS: dict[str, tuple[float, bool]] = {
    "shares": (1.0, True),
    "shares half": (0.5, True),
    "shares quarter": (0.25, True),
    "shares even": (0.0, True),
    "shares of logits": (1.0, False),
    "shares of logits half": (0.5, False),
    "shares of logits quarter": (0.25, False),
}
"""How much of the measured unevenness is believed, and whether gate and up are shared out too."""


def with_plan(built: DenseStep, plan: plans.DensePlan) -> DenseStep:
    """Another kernel, for all steps that are asked of it, on the same packed weights, and on the same buffers unless it
    exchanges others."""
    if plan.page_fragments != built.plan.page_fragments:
        raise ValueError(f"{plan} wants weights in pages of {plan.page_fragments} fragments; they are packed otherwise")
    other = copy.copy(built)
    other.plan = plan
    other.functions = load_kernels([plan])[0] * 2
    if plan.exchange_words() != built.plan.exchange_words():
        other.exchange = torch.full((plan.exchange_words(),), -1, dtype=torch.int32, device=built.exchange.device)
        other.state = torch.zeros_like(built.state)
    return other


def believed(cycles: Sequence[float], part: float) -> list[float]:
    """Paces of which so much of the distance from their mean is left."""
    mean = sum(cycles) / len(cycles)
    return [mean + part * (each - mean) for each in cycles]


def shares_of(plan: plans.DensePlan, paces: Paces) -> dict[str, Shares]:
    """Of each arm."""
    return {
        label: Shares.by_pace(plan, believed(paces.cycles, part), gate_up=gate_up)
        for label, (part, gate_up) in ARMS.items()
    }


def shared_forms(built: DenseStep, paces: Paces, rows: int) -> dict[str, DenseStep]:
    """One kernel for so many rows, with a table for each arm."""
    base, arms = with_plan(built, dataclasses.replace(built.plan.kernel(rows), shares=True)), {}
    for label, shares in shares_of(base.plan, paces).items():
        arms[f"lowlat-nvidia, {label}"] = other = copy.copy(base)
        other.share_out(paces, shares)
    return arms


def describe(plan: plans.DensePlan, paces: Paces, again: Paces) -> str:
    """The groups of one pace, how far a second measurement is from the first, and what each arm moves."""
    groups = [f"{len(group)} of {min(paces.cycles[b] for b in group):.0f}" for group in alike(paces.cycles)]
    both = zip(paces.cycles, again.cycles, strict=True)
    apart = max(abs(b / a - 1) for a, b in both) if paces.roles == again.roles else float("nan")
    rest = [number for number, role in enumerate(paces.roles) if role >= plans.BLOCKS]
    moved = "; ".join(
        f"{label} moves {first} and {second}, "
        f"at most {max(map(len, shares.gate_up))} and {max(map(len, shares.logits))}"
        for label, shares in shares_of(plan, paces).items()
        for first, second in [shares.moved()]
    )
    return f"cycles of blocks: {', '.join(groups)}; again within {apart:.1%}; at rest {rest}; {moved}"
