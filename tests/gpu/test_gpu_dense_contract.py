"""The dense step through the contract on a Hopper GPU: conformance checks, and measured distances from float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowlat_nvidia.dense.example import small_qwen3
from lowlat_nvidia.specs import DENSE
from lowlat_plugin import LowLatency, Policy, Registry
from lowlat_plugin.conformance import Case, ReferenceHost
from lowlat_plugin.conformance.checks import CHECKS, run_check
from lowlat_plugin.registry import Candidate
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Shape

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    result = run_check(Candidate("lowlat-nvidia", "0", DENSE), check)
    print(f"{check}: {result.status} in {result.seconds} s: {result.detail}")
    expected = "skipped" if check in ("deadline", "agreement") and result.status == "skipped" else "passed"
    assert result.status == expected, result.detail


def distances(case: Case, shape: Shape, seed: int) -> dict[str, float]:
    """Worst row's largest difference of logits over its largest logit: each path from float32, and from each other."""
    host = ReferenceHost(case)
    registry = Registry()
    registry.register(DENSE, "lowlat-nvidia")
    low = LowLatency(host, registry, Policy.REQUIRE)
    for stage in (low.choose, low.build, low.bind):
        stage()
    exact_weights = {name: tensor.float() for name, tensor in case.weights.items()}
    exact = ReferenceHost(dataclasses.replace(case, dtype="float32", weights=exact_weights))
    with torch.inference_mode():
        shadow = Shadow(host, [shape], (37, 200, 511), seed)
        step = shadow.step(shape)
        for mine, theirs in zip(exact.layers, host.layers, strict=True):
            mine.k_SHD.copy_(theirs.k_SHD)
            mine.v_SHD.copy_(theirs.v_SHD)
        step.page_table_QP = shadow._without_nan(step).page_table_QP
        truth = exact.general(step).logits_RV
        general = host.general(step).logits_RV
        kernel = low.forward(step).clone()
    low.close()
    scale = truth.abs().amax(-1)

    def worst(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(((a - b).abs().amax(-1) / scale).max())

    return {
        "general": worst(general, truth),
        "kernel": worst(kernel, truth),
        "between": worst(kernel, general),
    }


def test_nearer_to_float32_than_the_general_path() -> None:
    found = [
        distances(small_qwen3(seed), Shape(mode, requests, rows), seed)
        for seed in range(3)
        for mode, requests, rows in ((Mode.DECODE, 1, 1), (Mode.DECODE, 7, 7), (Mode.VERIFY, 2, 8))
    ]
    worst = {name: max(one[name] for one in found) for name in found[0]}
    print({name: f"{value:.2e}" for name, value in worst.items()})
    assert worst["kernel"] <= worst["general"]
    assert worst["between"] <= DENSE.numerics.bounds["logits"].limit
