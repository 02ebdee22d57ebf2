"""The products of routed experts, their own sources on a CPU: finds wrong indices, missing waits and deadlocks."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from emulator import machine

from lowlat_nvidia.deepseek_v4 import experts, experts_reference
from lowlat_nvidia.deepseek_v4.experts_plan import ExpertsPlan

pytestmark = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
PLAN = ExpertsPlan(hidden=1024, inner=64, experts=32, top=2, multiprocessors=22)
LARGER = dataclasses.replace(PLAN, inner=256, multiprocessors=23)


class EmulatedProducts(machine.OneAtATime):
    """Only the products."""

    def launch_early(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, dependent: bool = True
    ) -> None:
        assert self.name == "experts_products"
        super().launch_early(blocks, threads, parameters, stream)


def emulate(plan: ExpertsPlan, patch: pytest.MonkeyPatch, folder: Path) -> None:
    kernels = machine.Machine(machine.build(machine.EXPERTS, plan.definitions(), folder))
    patch.setattr(experts, "compile_cubin", lambda name, definitions: (b"", ""))
    patch.setattr(experts, "Function", lambda cubin, name, shared: EmulatedProducts(kernels, name, shared))


@pytest.mark.parametrize("plan", [PLAN, LARGER], ids=["two groups", "eight groups"])
@pytest.mark.parametrize("given", [False, True], ids=["chosen by the kernel", "given"])
def test_the_products_are_right_on_a_cpu(
    plan: ExpertsPlan, given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    emulate(plan, monkeypatch, tmp_path)
    weights = experts_reference.random_experts(plan.experts, plan.hidden, plan.inner, "cpu")
    gate = (torch.randn(plan.experts, plan.hidden) / plan.hidden**0.5).bfloat16()
    mixture = experts.RoutedExperts(plan, gate, torch.randn(plan.experts) * 0.1, weights)
    for rows in (7, 1):
        x = torch.randn(rows, plan.hidden).bfloat16()
        mixture.logits_RE[:rows] = x.float() @ gate.float().T
        chosen, shares = experts_reference.choose(mixture.logits_RE[:rows], mixture.bias, plan.top, plan.scaling)
        listed = None
        if given:
            distinct = chosen.unique()
            listed = torch.zeros(1 + 8 * plan.top, dtype=torch.int32)
            listed[0], listed[1 : 1 + len(distinct)] = len(distinct), distinct
            mixture.chosen_RT[:rows] = chosen
        mixture.parts.fill_(float("nan"))
        mixture.products(mixture.parameters(x, listed), 1)
        mixture.check()
        assert torch.equal(mixture.chosen_RT[:rows].long(), chosen)
        out = (mixture.parts[:rows] * shares[..., None]).sum(1)
        expected = experts_reference.routed(x, weights, chosen, shares, plan.limit)
        assert ((out - expected).norm() / expected.norm()).item() < 4e-3
