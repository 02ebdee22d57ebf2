"""Five sequential proposals of a Markov draft head: one launch beside the plain steps in a CUDA graph, in one run.

    python benchmarks/draft_proposals.py

takes about 15 seconds on an H200. Weights are random; four sets of head, table and base logits take turns, so that no
launch finds its head in the L2 cache of the launch before. A sample is one graph of 16 launches, divided by 16.
Greedy tokens of both arms are compared with the float64 reference first.

    python benchmarks/draft_proposals.py --ranks 2

splits the vocabulary over two GPUs, a process each: the kernel agrees on tokens through peer memory, the plain steps
gather each GPU's best by NCCL. A sample is then the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import exchange, join, slowest
from variants import fields, verdict

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.comm.peers import PeerBuffer
from lowlat_nvidia.draft import reference
from lowlat_nvidia.draft.markov import MarkovProposals, ProposalTensors
from lowlat_nvidia.draft.plan import MarkovPlan

SETS, PASSES, STEPS = 4, 4, 5
SURE = 0.05
"""The plain arm rounds each product to bfloat16: below this margin it may choose another token."""


CASES = ((1, 0.0), (1, 0.8), (8, 0.0))


class Set:
    """One set of weights and inputs; of several ranks, `rank`'s part. All ranks draw the same numbers."""

    def __init__(self, plan: MarkovPlan, requests: int, temperature: float, rank: int = 0) -> None:
        own = slice(rank * plan.local_vocabulary, (rank + 1) * plan.local_vocabulary)
        self.whole_head = (torch.randn(plan.vocabulary, plan.rank, device="cuda") * 0.2).bfloat16()
        self.embedding = torch.randn(plan.vocabulary, plan.rank, device="cuda").bfloat16()
        self.anchors = torch.randint(plan.vocabulary, (requests,), device="cuda")
        self.whole_base = torch.randn(requests, STEPS, plan.vocabulary, device="cuda") * 2
        self.plan, self.first = plan, own.start
        self.head = self.whole_head[own].contiguous()
        self.inputs = ProposalTensors(
            self.whole_base[..., own].contiguous(),
            self.anchors,
            torch.full((requests,), temperature, device="cuda"),
            torch.arange(requests, device="cuda"),
            torch.arange(requests, device="cuda") * 1000,
        )
        self.built = MarkovProposals(plan, self.head, self.embedding, rank)
        if plan.ranks > 1:
            self.inbox, self.error = (PeerBuffer(size, rank, exchange) for size in (plan.inbox_bytes, 4096))
            self.built.connect(self.inbox.addresses, self.error.addresses)

    def check(self) -> None:
        """Compares all arms with the reference where margins are clear."""
        lists = (
            t.tolist() for t in (self.anchors, self.inputs.temperatures_R, self.inputs.seeds_R, self.inputs.positions_R)
        )
        expected, _, margins = reference.propose(self.whole_head, self.embedding, self.whole_base, *lists)
        arms = [(self.built.run(self.inputs), 1e-3)]
        if not self.inputs.temperatures_R.any():
            arms.append((self.plain(), SURE))
        for tokens, sure in arms:
            clear = (margins > sure).cumprod(1).bool()  # up to the first token that rounding may decide
            assert torch.equal(tokens[clear], expected[clear])
        self.ended_well()

    def ended_well(self) -> None:
        """Raises where a block gave up."""
        if self.plan.ranks > 1:
            torch.cuda.synchronize()
            MarkovProposals.explain(self.error.read_word(0))
        self.built.check()

    def plain(self) -> torch.Tensor:
        """The plain twin; greedy."""
        if self.plan.ranks == 1:
            return reference.plain_step(self.head, self.embedding, self.inputs.base_RSL, self.anchors)
        tokens, found = self.anchors, []
        for step in range(STEPS):
            best = (self.inputs.base_RSL[:, step] + (self.embedding[tokens] @ self.head.T).float()).max(-1)
            pair = torch.stack((best.values, (best.indices + self.first).float()), -1)  # numbers below 2^24 are exact
            pairs = pair.new_empty(self.plan.ranks, *pair.shape)
            dist.all_gather_into_tensor(pairs, pair)
            tokens = pairs[..., 1].gather(0, pairs[..., 0].argmax(0)[None])[0].long()
            found.append(tokens)
        return torch.stack(found, 1)


def measure(plan: MarkovPlan, requests: int, temperature: float, rounds: int, ceiling: float, rank: int) -> list[Row]:
    """Rows of one case."""
    sets = [Set(plan, requests, temperature, rank) for _ in range(SETS)]
    for one in sets:
        one.check()
    graphs = {"lowlat-nvidia": capture(lambda: [one.built.run(one.inputs) for one in sets * PASSES])}
    if temperature == 0:
        graphs["torch-eager-graph"] = capture(lambda: [one.plain() for one in sets * PASSES])

    def arm(graph: torch.cuda.CUDAGraph) -> Callable[[], list[float]]:
        return lambda: [sample / (SETS * PASSES) for sample in time_cuda(graph.replay, 30)]

    if plan.ranks > 1:
        samples = slowest(graphs, rounds, SETS * PASSES)
    else:
        measured = alternate({name: arm(graph) for name, graph in graphs.items()}, rounds)
        samples = {name: measured.samples(name) for name in measured.rounds}
        for name, error in measured.errors.items():
            print(f"   {name} broke and is left out: {error}", flush=True)
    for one in sets:
        one.ended_well()
    common: dict[str, Any] = {
        "metric": "step_us", "rows": requests, "width": STEPS,
        "dtype": "bfloat16", "concurrency": requests, "tp": plan.ranks,
        "bytes": plan.head_bytes + requests * STEPS * plan.local_vocabulary * 4,
    }  # fmt: skip
    note = f"{STEPS} proposals, temperature {temperature}, {SETS} weight sets in turn"
    rows = [
        row_from_samples(
            times,
            note=note,
            read_ceiling_tb_s=ceiling,
            **fields(name, f"markov-{plan.vocabulary}x{plan.rank}"),
            **common,
        )
        for name, times in samples.items()
    ]
    for name, row in zip(samples, rows, strict=True) if rank == 0 else ():
        print(
            f"{plan.ranks} GPUs, {row.rows} requests, T {temperature}: {name:24} {row.median:7.1f}"
            f" [{row.low:.1f}, {row.high:.1f}] us",
            flush=True,
        )
    if rank == 0:
        print(verdict(samples, "torch-eager-graph"), flush=True)
    return rows


def run(rank: int, ranks: int, vocabulary: int, width: int, rounds: int, results: str, port: int = 0) -> None:
    """All cases on one rank; the first writes the result."""
    if ranks > 1:
        join(rank, ranks, port)
    torch.manual_seed(0)
    ceiling = measure_ceiling("cuda").tb_s
    result = new_result("draft-proposals", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling, gpus=ranks)
    for requests, temperature in CASES:
        plan = MarkovPlan(vocabulary, rank=width, ranks=ranks, requests=requests)
        result.rows += measure(plan, requests, temperature, rounds, ceiling, rank)
    if rank == 0:
        print(save(result, Path(results)), flush=True)
    if ranks > 1:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # captured NCCL calls hang when a process group is taken down


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=129280)
    parser.add_argument("--rank", type=int, default=256, help="of the head")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = str(check_folder(got.results))
    if got.ranks == 1:
        run(0, 1, got.vocabulary, got.rank, got.rounds, folder)
    else:
        mp.spawn(run, (got.ranks, got.vocabulary, got.rank, got.rounds, folder, 29534), nprocs=got.ranks)


if __name__ == "__main__":
    main()
