"""The attention region of a DeepSeek-V4.1 layer (TP 4: 16 heads a GPU): early dependent launches beside ordinary ones.

    python benchmarks/attention_chain.py

takes about 15 seconds on an H200. Both arms are the same four kernels; `general` starts each when the one before it has
ended. Weights and entries are random; four sets take turns. A sample is one graph of 16 regions, divided by 16.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, default_directory, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import AttentionChain, ChainPlan

SETS, PASSES = 4, 4


def measure(plan: ChainPlan, rows: int, rounds: int, ceiling: float) -> list[Row]:
    """Rows of one number of rows; both arms are compared with the reference first."""
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
    graphs = {}
    for arm, early in (("lowlat-nvidia", True), ("general", False)):
        graphs[arm] = capture(lambda early=early: [chain.run(inputs, early=early) for chain, inputs in cases * PASSES])
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
            measured.samples(arm), workload="attention-region", arm=arm, metric="step_us", rows=rows, dtype="fp8", tp=4,
            bytes=size, read_ceiling_tb_s=ceiling, note=f"one GPU's part of TP 4; {SETS} weight sets in turn",
        )  # fmt: skip
        found.append(row)
        floors = row.median * ceiling * 1e6 / size
        print(f"{rows} rows {arm:14} {row.median:6.2f} [{row.low:.2f}, {row.high:.2f}] us, {floors:.2f} floors")
    return found


def main() -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6,1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    ceiling = measure_ceiling("cuda")
    result = new_result("attention-region", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for rows in (int(text) for text in got.rows.split(",")):
        result.rows += measure(ChainPlan(), rows, got.rounds, ceiling.tb_s)
    path = save(result, got.results or default_directory())
    print(path)
    return path


if __name__ == "__main__":
    main()
