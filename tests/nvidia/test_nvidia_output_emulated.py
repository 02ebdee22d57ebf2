"""The output projection, its own source on a CPU: what ranks publish, and partial sums."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from emulator import machine
from output_kit import make_residual, make_weights

from lowlat_nvidia.comm import output_projection
from lowlat_nvidia.comm.output_projection import MAX_ROWS, OutputPlan, OutputProjection
from lowlat_nvidia.formats import quantise

pytestmark = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
PLAN = OutputPlan(hidden=512, inputs=1024, ranks=2, blocks=5)


class EmulatedKernel(machine.OneAtATime):
    """Only what publishes."""

    def launch_early(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, dependent: bool = True
    ) -> None:
        if self.name == "output_project":
            super().launch_early(blocks, threads, parameters, stream)


def test_every_rank_gets_every_tile_with_the_steps_tag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(1)
    kernels = machine.Machine(machine.build(machine.OUTPUT, PLAN.definitions(), tmp_path))
    monkeypatch.setattr(output_projection, "compile_cubin", lambda name, definitions: (b"", ""))
    monkeypatch.setattr(
        output_projection, "Function", lambda cubin, name, shared: EmulatedKernel(kernels, name, shared)
    )
    inboxes = [torch.zeros(2, PLAN.ranks, MAX_ROWS, PLAN.hidden // 2, 2, dtype=torch.int32) for _ in range(PLAN.ranks)]
    errors = [torch.zeros(1, dtype=torch.int32) for _ in range(PLAN.ranks)]
    weights = [make_weights(PLAN, "cpu") for _ in range(PLAN.ranks)]
    addresses = [t.data_ptr() for t in inboxes], [t.data_ptr() for t in errors]
    ranks = [OutputProjection(PLAN, *weights[rank][:2], rank, *addresses) for rank in range(PLAN.ranks)]
    for step, rows in enumerate((7, 1), 1):
        residual = make_residual(PLAN, rows, "cpu")
        for rank, one in enumerate(ranks):
            z = torch.randn(rows, PLAN.inputs).bfloat16()
            expected = quantise(z) @ weights[rank][2].T
            one.run(z, residual, 1)
            one.partial_RH.fill_(float("nan"))
            one.run_plain(z, residual, 1)
            sums = [one.partial_RH[:rows]]
            for inbox in inboxes:
                words = inbox[step % 2, rank, :rows]
                assert (words[..., 1] == step).all()
                sums.append(words[..., 0].contiguous().view(torch.bfloat16).float())
            for found in sums:
                assert ((found - expected).norm() / expected.norm()).item() < 3e-3
                assert torch.equal(found, sums[0])
    assert not any(errors)
