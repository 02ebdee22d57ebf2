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
UNEVEN = dataclasses.replace(
    PLAN, inner=576
)  # with eight rows: enough of down that blocks of the last experts get less


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


def test_rows_made_ahead_have_the_bits_of_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = UNEVEN
    torch.manual_seed(5)
    weights = experts_reference.random_experts(plan.experts, plan.hidden, plan.inner, "cpu")
    gate = (torch.randn(plan.experts, plan.hidden) / plan.hidden**0.5).bfloat16()
    bias, x = torch.randn(plan.experts) * 0.1, torch.randn(8, plan.hidden).bfloat16()
    ahead = dataclasses.replace(plan, rows_ahead=True)
    found = []
    for made in (plan, ahead, dataclasses.replace(ahead, all_multiply=True)):
        emulate(made, monkeypatch, tmp_path)
        mixture = experts.RoutedExperts(made, gate, bias, weights)
        for rows in (8, 1):
            mixture.logits_RE[:rows] = x[:rows].float() @ gate.float().T
            mixture.parts.fill_(float("nan"))
            mixture.products(mixture.parameters(x[:rows]), 1)
            mixture.check()
            found.append(mixture.parts[:rows].clone())
        assert mixture.chosen_RT.unique().numel() * 64 * 9 >= (16 + 240 + 1) * plan.multiprocessors, "see share_work"
    assert found[0].isfinite().all()
    for form in (2, 4):
        assert torch.equal(found[form], found[0])
        assert torch.equal(found[form + 1], found[1])
