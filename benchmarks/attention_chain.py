"""The attention region of a DeepSeek-V4.1 layer (TP 4: 16 heads a GPU): early dependent launches beside ordinary ones.

    python benchmarks/attention_chain.py

takes about 10 seconds on an H200. Arms are the same four kernels: `lowlat-nvidia`, launched early, and `general`, which
starts each when the one before it has ended.
Weights and entries are random; four sets take turns. A sample is one graph of 16 regions, divided by 16.

    python benchmarks/attention_chain.py --stamps

takes about 10 seconds and writes no result: when the phases of every kernel end, by the blocks' own clocks.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from variants import verdict

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import AttentionChain, ChainInputs, ChainPlan

SETS, PASSES = 4, 4
PHASES = {
    "down": ("starts", "asks for weights", "x is there", "quantised", "multiplied", "published"),
    "up": ("starts", "asks for weights", "latents taken", "quantised", "multiplied", "published"),
    "attend": ("starts", "entries there", "unpacked", "queries taken", "weights", "sums", "joined", "published"),
    "group": ("starts", "asks for weights", "heads taken", "multiplied", "stored"),
}


def make_cases(plan: ChainPlan, rows: int) -> list[tuple[AttentionChain, ChainInputs]]:
    """Sets of weights and inputs, each compared with the reference both ways."""
    cases = []
    for _ in range(SETS):
        weights, inputs = reference.random_weights(plan, "cuda"), reference.random_inputs(plan, rows, "cuda")
        chain = AttentionChain(plan, weights)
        expected = reference.attention_region(weights, copy.deepcopy(inputs), plan.groups, chain.eps)[0]
        for early in (True, False):
            chain.out_RO.fill_(float("nan"))
            distance = ((chain.run(inputs, early=early).float() - expected).norm() / expected.norm()).item()
            assert distance < 1.5e-2, f"{distance} from the reference"
        cases.append((chain, inputs))
    return cases


def measure(rows: int, rounds: int, ceiling: float) -> list[Row]:
    """Rows of one number of rows."""
    plan = ChainPlan()
    cases = make_cases(plan, rows)
    graphs = {
        arm: capture(lambda early=early: [chain.run(inputs, early=early) for chain, inputs in cases * PASSES])
        for arm, early in (("lowlat-nvidia", True), ("general", False))
    }
    arms = {
        arm: (lambda g=graph: [t / (SETS * PASSES) for t in time_cuda(g.replay, 30)]) for arm, graph in graphs.items()
    }
    measured = alternate(arms, rounds)
    for chain, _ in cases:
        chain.check()
    size = plan.weight_bytes + rows * 512 * 288 + (128 + rows) * 528
    found = []
    for arm in measured.rounds:
        row = row_from_samples(
            measured.samples(arm), metric="step_us", rows=rows, dtype="fp8", tp=4,
            bytes=size, read_ceiling_tb_s=ceiling, note=f"one GPU's part of TP 4; {SETS} weight sets in turn",
            arm=arm, workload="attention-region",
        )  # fmt: skip
        found.append(row)
        floors = row.median * ceiling * 1e6 / size
        print(f"{rows} rows {arm:15} {row.median:6.2f} [{row.low:.2f}, {row.high:.2f}] us, {floors:.2f} floors")
    print(verdict({arm: measured.samples(arm) for arm in measured.rounds}, "general"), flush=True)
    for arm, error in measured.errors.items():
        print(f"   {arm} broke and is left out: {error}", flush=True)
    return found


def timeline(plan: ChainPlan, rows: int, runs: int = 40) -> None:
    """Prints when phases end: medians and the last of all blocks, in microseconds from when the inputs are there."""
    cases = []
    for _ in range(SETS):
        weights, inputs = reference.random_weights(plan, "cuda"), reference.random_inputs(plan, rows, "cuda")
        cases.append((AttentionChain(plan, weights), inputs))
    blocks = cases[0][0].launches(rows)
    stamps = []
    for _ in range(runs):
        for chain, inputs in cases:
            chain.run(inputs)
        torch.cuda.synchronize()
        for chain, _ in cases:
            stamps.append(chain.stamps - chain.stamps[0, : blocks["down"], 2].min())
    for chain, _ in cases:
        chain.check()
    all_stamps = torch.stack(stamps[SETS:]).double() / 1e3
    for number, (kernel, phases) in enumerate(PHASES.items()):
        for phase, name in enumerate(phases):
            times = all_stamps[:, number, : blocks[kernel], phase]
            last = times.amax(1).median().item()
            print(f"{kernel:7} {name:17} {times.median().item():6.2f}, the last block {last:6.2f} us", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6,1,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stamps", action="store_true", help="when phases of 6 rows end, in place of times of regions")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = check_folder(got.results)
    if got.stamps:
        timeline(ChainPlan(stamps=True), 6)
        return
    ceiling = measure_ceiling("cuda")
    result = new_result("attention-region", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for rows in (int(text) for text in got.rows.split(",")):
        result.rows += measure(rows, got.rounds, ceiling.tb_s)
    print(save(result, folder))


if __name__ == "__main__":
    main()
