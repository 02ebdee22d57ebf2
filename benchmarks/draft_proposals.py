"""Five sequential proposals of a Markov draft head: one launch beside the plain steps in a CUDA graph, in one run.

    python benchmarks/draft_proposals.py

takes about 15 seconds on an H200. Weights are random; four sets of head, table and base logits take turns, so that no
launch finds its head in the L2 cache of the launch before. A sample is one graph of 16 launches, divided by 16.
Greedy tokens of both arms are compared with the float64 reference first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, default_directory, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.draft import reference
from lowlat_nvidia.draft.markov import MarkovProposals, ProposalTensors
from lowlat_nvidia.draft.plan import MarkovPlan

SETS, PASSES, STEPS = 4, 4, 5
SURE = 0.05
"""The plain arm rounds each product to bfloat16: below this margin it may choose another token."""


class Set:
    """One set of weights and inputs."""

    def __init__(self, plan: MarkovPlan, requests: int, temperature: float) -> None:
        self.head = (torch.randn(plan.vocabulary, plan.rank, device="cuda") * 0.2).bfloat16()
        self.embedding = torch.randn(plan.vocabulary, plan.rank, device="cuda").bfloat16()
        self.anchors = torch.randint(plan.vocabulary, (requests,), device="cuda")
        self.inputs = ProposalTensors(
            torch.randn(requests, STEPS, plan.vocabulary, device="cuda") * 2,
            self.anchors,
            torch.full((requests,), temperature, device="cuda"),
            torch.arange(requests, device="cuda"),
            torch.arange(requests, device="cuda") * 1000,
        )
        self.built = MarkovProposals(plan, self.head, self.embedding)

    def check(self) -> None:
        """Compares both arms with the reference where margins are clear."""
        lists = (
            t.tolist() for t in (self.anchors, self.inputs.temperatures_R, self.inputs.seeds_R, self.inputs.positions_R)
        )
        expected, _, margins = reference.propose(self.head, self.embedding, self.inputs.base_RSL, *lists)
        arms = [(self.built.run(self.inputs), 1e-3)]
        if not self.inputs.temperatures_R.any():
            arms.append((self.plain(), SURE))
        for tokens, sure in arms:
            clear = (margins > sure).cumprod(1).bool()  # up to the first token that rounding may decide
            assert torch.equal(tokens[clear], expected[clear])
        self.built.check()

    def plain(self) -> torch.Tensor:
        """The plain twin; greedy."""
        return reference.plain_step(self.head, self.embedding, self.inputs.base_RSL, self.anchors)


def measure(plan: MarkovPlan, requests: int, temperature: float, rounds: int, ceiling: float) -> list[Row]:
    """Rows of one case."""
    sets = [Set(plan, requests, temperature) for _ in range(SETS)]
    for one in sets:
        one.check()
    graphs = {"lowlat-nvidia": capture(lambda: [one.built.run(one.inputs) for one in sets * PASSES])}
    if temperature == 0:
        graphs["torch-eager-graph"] = capture(lambda: [one.plain() for one in sets * PASSES])

    def arm(graph: torch.cuda.CUDAGraph) -> Callable[[], list[float]]:
        return lambda: [sample / (SETS * PASSES) for sample in time_cuda(graph.replay, 30)]

    measured = alternate({name: arm(graph) for name, graph in graphs.items()}, rounds)
    for one in sets:
        one.built.check()
    common: dict[str, Any] = {
        "workload": f"markov-{plan.vocabulary}x{plan.rank}", "metric": "step_us", "rows": requests, "width": STEPS,
        "dtype": "bfloat16", "concurrency": requests, "bytes": plan.head_bytes + requests * STEPS * plan.vocabulary * 4,
    }  # fmt: skip
    note = f"{STEPS} proposals, temperature {temperature}, {SETS} weight sets in turn"
    rows = [
        row_from_samples(measured.samples(name), arm=name, note=note, read_ceiling_tb_s=ceiling, **common)
        for name in measured.rounds
    ]
    for name, error in measured.errors.items():
        print(f"   {name} broke and is left out: {error}", flush=True)
    for row in rows:
        print(
            f"{row.rows} requests, T {temperature}: {row.arm:18} {row.median:7.1f} [{row.low:.1f}, {row.high:.1f}] us"
        )
    return rows


def main() -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    ceiling = measure_ceiling("cuda")
    result = new_result("draft-proposals", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for requests, temperature in ((1, 0.0), (1, 0.8), (8, 0.0)):
        plan = MarkovPlan(got.vocabulary, rank=got.rank, requests=requests)
        result.rows += measure(plan, requests, temperature, got.rounds, ceiling.tb_s)
    path = save(result, got.results or default_directory())
    print(path)
    return path


if __name__ == "__main__":
    main()
