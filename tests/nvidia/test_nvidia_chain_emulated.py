"""The attention chain's own sources on a CPU (see test_nvidia_dense_emulated.py), kernels that
overlap included."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from emulator import machine

from lowlat_nvidia.deepseek_v4 import attention_chain as chains
from lowlat_nvidia.deepseek_v4 import attention_reference as reference

pytestmark = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
# Sums are exact here (on a GPU they are not: test_nvidia_chain_numerics.py). What is left are weights and means of keys
# in float16, and values that these move by a step of FP8.
BOUND = 8e-3
PLAN = chains.ChainPlan(hidden=256, latent=256, groups=4, group_outputs=64)


class EmulatedChain(chains.AttentionChain):
    """Launches are kept until `finish`, so that kernels of several regions overlap."""

    def __init__(self, weights: chains.ChainWeights, kernels: machine.Machine) -> None:
        self.machine, self.weights = kernels, weights
        super().__init__(PLAN, weights)

    def finish(self) -> None:
        self.machine.finish(chains.THREADS)
        self.check()


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedChain]:
    kernels = machine.Machine(machine.build(machine.CHAIN, PLAN.definitions(), tmp_path_factory.mktemp("chain")))
    shared = PLAN.shared()
    numbers = {"down": (0, 4), "up": (1, 1), "attend": (2, 8), "group": (3, 4), "group_beside": (3, 4)}
    functions = {name: machine.EmulatedFunction(kernels, *numbers[name], size) for name, size in shared.items()}
    torch.manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "_kernels", lambda plan, device: functions)
        yield EmulatedChain(reference.random_weights(PLAN, "cpu"), kernels)


@pytest.mark.parametrize(
    ("early", "rows", "window", "chosen"), [(True, 3, 128, 512), (False, 1, 5, 70), (True, 2, 9, 0), (False, 1, 1, 0)]
)
def test_the_kernels_are_right_on_a_cpu(chain: EmulatedChain, early: bool, rows: int, window: int, chosen: int) -> None:
    torch.manual_seed(rows + window)
    inputs = reference.random_inputs(PLAN, rows, "cpu", window=window, chosen=chosen)
    theirs = copy.deepcopy(inputs)
    chain.out_RO.fill_(float("nan"))
    out = chain.run(inputs, 1, early=early)
    chain.finish()
    expected, data, scales = reference.attention_region(chain.weights, theirs, PLAN.groups, chain.eps)
    assert ((out.float() - expected).norm() / expected.norm()).item() < BOUND
    for row in range(rows):
        mine, mine_scales = reference._window_entry(inputs, int(inputs.window_RW[row, -1]))
        assert (mine == data[row]).float().mean() > 0.999
        assert torch.equal(mine_scales, scales[row])
    latent, query = chain.exchanged[:2]
    assert (latent == 255).all()
    assert (query == 255).all()


def test_regions_that_follow_each_other_do_not_mix(chain: EmulatedChain) -> None:
    """A region starts while the one before it runs, and they exchange through the same words."""
    regions = [reference.random_inputs(PLAN, rows, "cpu") for rows in (2, 1, 2)]
    alone = []
    for inputs in copy.deepcopy(regions):
        out = chain.run(inputs, 1, early=False)
        chain.finish()
        alone.append(out.clone())
    together = []
    for inputs in regions:
        chain.out_RO = torch.full_like(chain.out_RO, float("nan"))
        together.append(chain.run(inputs, 1))
    chain.finish()
    for mine, theirs in zip(together, alone, strict=True):
        assert torch.equal(mine, theirs)
