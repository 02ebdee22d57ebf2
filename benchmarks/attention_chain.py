"""The attention region of a DeepSeek-V4.1 layer (TP 4: 16 heads a GPU): early dependent launches beside ordinary ones.

    python benchmarks/attention_chain.py

takes about 15 seconds on an H200. Arms are the same four kernels: `lowlat-nvidia`, launched early, and `general`, which
starts each when the one before it has ended. Both are timed in several forms: the default; `weights-ahead`, whose
kernels ask for later kernels' weights with any number of rows, but never for entries; `two-weights-ahead`, whose
grouped projection has room for two blocks on a multiprocessor as well; and `few`, which does with any number of rows
what the default does with one. The lines after a number of rows say what share of `general` each form takes, and which
is the fastest.
Weights and entries are random; four sets take turns. A sample is one graph of 16 regions, divided by 16.

    python benchmarks/attention_chain.py --stamps

takes about 20 seconds and writes no result: when the phases of every kernel end, by the blocks' own clocks.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from pathlib import Path

import torch
from variants import fields, verdict

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat_nvidia.deepseek_v4 import attention_reference as reference
from lowlat_nvidia.deepseek_v4.attention_chain import AttentionChain, ChainInputs, ChainPlan

SETS, PASSES = 4, 4
FORMS = {
    "": ChainPlan(),
    " weights-ahead": ChainPlan(weights_ahead=8, entries_ahead=0),
    " two-weights-ahead": ChainPlan(weights_ahead=8, entries_ahead=0, beside=8),
    " few": ChainPlan(weights_ahead=8, entries_ahead=8, beside=8),
}
PHASES = {
    "down": ("starts", "asks for weights", "x is there", "quantised", "multiplied", "published"),
    "up": ("starts", "asks for weights", "latents taken", "quantised", "multiplied", "published"),
    "attend": ("starts", "entries there", "unpacked", "queries taken", "weights", "sums", "joined", "published"),
    "group": ("starts", "asks for weights", "heads taken", "multiplied", "stored"),
}


def make_cases(rows: int) -> list[tuple[dict[str, AttentionChain], ChainInputs]]:
    """Sets of weights and inputs with a chain of every form, all compared with the reference both ways."""
    cases = []
    for _ in range(SETS):
        plan = FORMS[""]
        weights, inputs = reference.random_weights(plan, "cuda"), reference.random_inputs(plan, rows, "cuda")
        chains = {form: AttentionChain(made, weights) for form, made in FORMS.items()}
        expected = reference.attention_region(weights, copy.deepcopy(inputs), plan.groups, chains[""].eps)[0]
        for chain in chains.values():
            for early in (True, False):
                chain.out_RO.fill_(float("nan"))
                distance = ((chain.run(inputs, early=early).float() - expected).norm() / expected.norm()).item()
                assert distance < 1.5e-2, f"{distance} from the reference"
        cases.append((chains, inputs))
    return cases


def measure(rows: int, rounds: int, ceiling: float) -> list[Row]:
    """Rows of one number of rows."""
    cases = make_cases(rows)
    graphs = {}
    for form in FORMS:
        chains = [(made[form], inputs) for made, inputs in cases * PASSES]
        for arm, early in (("lowlat-nvidia", True), ("general", False)):
            graphs[arm + form] = capture(
                lambda chains=chains, early=early: [chain.run(inputs, early=early) for chain, inputs in chains]
            )
    arms = {
        arm: (lambda g=graph: [t / (SETS * PASSES) for t in time_cuda(g.replay, 30)]) for arm, graph in graphs.items()
    }
    measured = alternate(arms, rounds)
    for chains, _ in cases:
        for chain in chains.values():
            chain.check()
    size = FORMS[""].weight_bytes + rows * 512 * 288 + (128 + rows) * 528
    found = {}
    for arm in measured.rounds:
        row = row_from_samples(
            measured.samples(arm), metric="step_us", rows=rows, dtype="fp8", tp=4,
            bytes=size, read_ceiling_tb_s=ceiling, note=f"one GPU's part of TP 4; {SETS} weight sets in turn",
            **fields(arm, "attention-region"),
        )  # fmt: skip
        found[arm] = row
        floors = row.median * ceiling * 1e6 / size
        print(f"{rows} rows {arm:30} {row.median:6.2f} [{row.low:.2f}, {row.high:.2f}] us, {floors:.2f} floors")
    for form in FORMS:
        early, general = (found.get(arm + form) for arm in ("lowlat-nvidia", "general"))
        if early and general:
            print(
                f"   {form.strip() or 'default'}: early launches take {early.median / general.median:.3f} of ordinary"
            )
    print(verdict({arm: measured.samples(arm) for arm in measured.rounds}), flush=True)
    for arm, error in measured.errors.items():
        print(f"   {arm} broke and is left out: {error}", flush=True)
    return list(found.values())


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
    parser.add_argument("--rows", default="6,1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stamps", action="store_true", help="when phases of 6 rows end, in place of times of regions")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = check_folder(got.results)
    if got.stamps:
        for form, plan in FORMS.items():
            print(f"{form.strip() or 'default'}:")
            timeline(dataclasses.replace(plan, stamps=True), 6)
        return
    ceiling = measure_ceiling("cuda")
    result = new_result("attention-region", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for rows in (int(text) for text in got.rows.split(",")):
        result.rows += measure(rows, got.rounds, ceiling.tb_s)
    print(save(result, folder))


if __name__ == "__main__":
    main()
