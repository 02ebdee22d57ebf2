"""Routed experts of DeepSeek-V4.1 (TP 4: 576 columns a GPU), the overlapped launches beside their plain twin, one run.

    python benchmarks/expert_window.py

takes about 20 seconds on an H200. Two windows: from the router to the end of the first products (`window`), and the
whole mixture (`mixture`). The plain twin has the same router and product kernels, launched one after the other, and
PyTorch's top-k, sort and counts between them. `products` are first and second products alone, launched early as in the
mixture (each waits for all of the one before), for the read ceiling.
Weights are random; four sets take turns; distinct experts are counted in this run. A sample is one graph of eight
windows, divided by eight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from variants import verdict

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.deepseek_v4 import experts_reference as reference
from lowlat_nvidia.deepseek_v4.experts import RoutedExperts
from lowlat_nvidia.deepseek_v4.experts_plan import MAX_ROWS, ExpertsPlan

SETS, PASSES = 4, 2
DEFAULT = "lowlat-nvidia"


class Twin:
    """A mixture's kernels with choice and placement by PyTorch between them, and overlapped as the library has them."""

    def __init__(self, mixture: RoutedExperts, x_RH: torch.Tensor) -> None:
        self.mixture, self.x_RH = mixture, x_RH
        plan = mixture.plan
        self.listed = torch.zeros(1 + MAX_ROWS * plan.top, dtype=torch.int32, device=x_RH.device)
        self.parameters = mixture.parameters(x_RH, self.listed)
        self.first = mixture.parameters(x_RH, self.listed, down=False)

    def place(self) -> None:
        """Top-k, weights, sort by expert, distinct experts in ascending order."""
        mixture, rows, plan = self.mixture, len(self.x_RH), self.mixture.plan
        scores = F.softplus(mixture.logits_RE[:rows]).sqrt()
        chosen = (scores + mixture.bias).topk(plan.top, -1).indices
        shares = scores.gather(-1, chosen)
        mixture.weights_RT[:rows] = shares / (shares.sum(-1, keepdim=True) + 1e-20) * plan.scaling
        mixture.chosen_RT[:rows] = chosen
        ordered = chosen.flatten().sort().values
        new = torch.ones_like(ordered)
        new[1:] = ordered[1:] != ordered[:-1]
        self.listed[1:].scatter_(0, new.cumsum(0) - 1, ordered.int())
        self.listed[0] = new.sum()

    def window(self) -> None:
        """Router to the end of the first products."""
        stream = torch.cuda.current_stream().cuda_stream
        self.mixture.route(self.first, stream)
        self.place()
        self.mixture.products(self.first, stream, early=False)

    def run(self) -> None:
        """The whole mixture."""
        stream = torch.cuda.current_stream().cuda_stream
        self.mixture.route(self.parameters, stream)
        self.place()
        self.mixture.products(self.parameters, stream, early=False)
        self.mixture.weighted_sum(self.parameters, stream, early=False)

    def products(self) -> None:
        """Both products alone, experts as chosen before; launched early."""
        self.mixture.products(self.parameters, torch.cuda.current_stream().cuda_stream)

    def overlapped_window(self) -> None:
        """The window as the library has it."""
        parameters, stream = self.mixture.parameters(self.x_RH, down=False), torch.cuda.current_stream().cuda_stream
        self.mixture.route(parameters, stream)
        self.mixture.products(parameters, stream)

    def overlapped(self) -> None:
        """The whole mixture as the library has it."""
        self.mixture.run(self.x_RH)


def compare(twins: list[Twin], sets: list[Any], inputs: list[torch.Tensor]) -> None:
    """Both ways against the reference."""
    for twin, (mixture, weights), x in zip(twins, sets, inputs, strict=True):
        plan = mixture.plan
        chosen = reference.choose(x.float() @ mixture.gate.float().T, mixture.bias, plan.top, plan.scaling)
        expected = reference.routed(x, weights, *chosen, plan.limit)
        for run in (twin.run, twin.overlapped):
            mixture.out_RH.fill_(float("nan"))
            run()
            distance = ((mixture.out_RH[: len(x)] - expected).norm() / expected.norm()).item()
            assert distance < 1e-2, f"an arm is {distance} from the reference"
        mixture.check()


def measure(plan: ExpertsPlan, sets: list[Any], rows: int, rounds: int, ceiling: float) -> list[Row]:
    """Rows of one number of rows."""
    inputs = [torch.randn(rows, plan.hidden, device="cuda").bfloat16() for _ in sets]
    twins = [Twin(mixture, x) for (mixture, _), x in zip(sets, inputs, strict=True)]
    compare(twins, sets, inputs)
    distinct = sum(int(twin.listed[0]) for twin in twins) / len(twins)
    first, second = distinct * plan.first_bytes, distinct * plan.second_bytes
    gate = plan.experts * plan.hidden * 2
    windows: dict[str, tuple[float, dict[str, list[Callable[[], object]]]]] = {
        "window": (
            first + gate,
            {
                DEFAULT: [twin.overlapped_window for twin in twins],
                "torch-eager-graph": [twin.window for twin in twins],
            },
        ),
        "mixture": (
            first + second + gate,
            {
                DEFAULT: [twin.overlapped for twin in twins],
                "torch-eager-graph": [twin.run for twin in twins],
            },
        ),
        "products": (
            first + second,
            {DEFAULT: [twin.products for twin in twins]},
        ),
    }
    found = []
    for name, (size, arms) in windows.items():
        graphs = {arm: capture(lambda runs=runs: [run() for run in runs * PASSES]) for arm, runs in arms.items()}
        measured = alternate(
            {
                arm: (lambda g=graph: [t / (SETS * PASSES) for t in time_cuda(g.replay, 20)])
                for arm, graph in graphs.items()
            },
            rounds,
        )
        for arm in measured.rounds:
            row = row_from_samples(
                measured.samples(arm), metric="step_us", rows=rows, dtype="fp4",
                tp=4, bytes=int(size), read_ceiling_tb_s=ceiling, details={"distinct_experts": distinct},
                note=f"one GPU's part of TP 4; {SETS} weight sets in turn", arm=arm, workload=f"experts-{name}",
            )  # fmt: skip
            found.append(row)
            print(
                f"{rows} rows, {distinct:.1f} experts, {name:9} {arm:17} {row.median:7.1f}"
                f" [{row.low:.1f}, {row.high:.1f}] us, {row.ceiling_fraction:.2f} of the ceiling",
                flush=True,
            )
        print(verdict({arm: measured.samples(arm) for arm in measured.rounds}, "torch-eager-graph"), flush=True)
        for arm, error in measured.errors.items():
            print(f"   {arm} broke and is left out: {error}", flush=True)
    for mixture, _ in sets:
        mixture.check()
    return found


def main() -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6,1,8")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = check_folder(got.results)
    ceiling = measure_ceiling("cuda")
    plan = ExpertsPlan()
    sets = []
    for _ in range(SETS):
        weights = reference.random_experts(plan.experts, plan.hidden, plan.inner, "cuda")
        gate = (torch.randn(plan.experts, plan.hidden, device="cuda") / plan.hidden**0.5).bfloat16()
        sets.append((RoutedExperts(plan, gate, torch.randn(plan.experts, device="cuda") * 0.1, weights), weights))
    print(f"read ceiling {ceiling.tb_s} TB/s", flush=True)
    result = new_result("expert-window", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for rows in (int(text) for text in got.rows.split(",")):
        result.rows += measure(plan, sets, rows, got.rounds, ceiling.tb_s)
    path = save(result, folder)
    print(path)
    return path


if __name__ == "__main__":
    main()
