"""Checks the dense step against float32 PyTorch on fresh random inputs, then times it. Needs one Hopper GPU.

python benchmarks/dense_step.py --models llama-1b,qwen3-0.6b --rows 1,8 --context 1024 --stamps
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("LOWLAT_CACHE", "/tmp/lowlat-cubins")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/lowlat-nvidia/src"))

import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import reference
from lowlat_nvidia.dense.cases import copy_pools, make_case
from lowlat_nvidia.dense.pack import DenseWeights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.step import DenseStep, StepTensors

CEILING = 4.54e12


def check_case(
    built: DenseStep, weights: DenseWeights, positions: list[list[int]], page_size: int, seed: int
) -> tuple[float, float]:
    """Relative error of the worst row's logits and of the written keys and values. Raises on a wrong greedy token."""
    shape = built.plan.shape
    step, pools = make_case(shape, positions, page_size, seed)
    expected_pools = copy_pools(pools)
    expected = reference.reference_step(shape, weights, built.rotary, expected_pools, page_size, step)
    built.bind(pools, page_size)
    built.logits_RV.fill_(float("nan"))
    built.next_token_R.fill_(-7)
    logits = built.run(step)
    built.check()
    error = ((logits - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    assert torch.equal(built.next_token_R[: len(logits)], logits.argmax(1)), "greedy token"
    first = logits.clone()
    for _ in range(10):
        assert torch.equal(built.run(step), first), "a repeated step differs"
    built.check()
    written = max(
        ((a.float() - b.float()).norm() / (b.float() * (b.abs() < 1e3)).norm()).item()
        for mine, theirs in zip(pools, expected_pools, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    return error, written


def time_step(built: DenseStep, step: StepTensors, count: int = 40) -> list[float]:
    """Microseconds of launches that follow each other, sorted; as many as take 0.2 s come before."""
    begin = time.time()
    while time.time() - begin < 0.2:
        built.run(step)
        torch.cuda.synchronize()
    marks = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        built.run(step)
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    built.check()
    return sorted(start.elapsed_time(end) * 1e3 for start, end in marks)


def show_stamps(built: DenseStep, step: StepTensors) -> None:
    """Mean cycles of each stage over blocks and inner layers."""
    for _ in range(200):
        built.run(step)
    built.check()
    marks = built.stamps[:, 1:-2].double()
    following = built.stamps[:, 2:-1, 0].double()
    order = [0, 1, 2, 10, 12, 13, 4, 5, 6, 9, 7, 8]
    names = [
        "x gather",
        "qkv",
        "heads",
        "attend",
        "publish",
        "combine",
        "o gather",
        "o",
        "gu gather",
        "gate-up",
        "down gather",
        "down",
    ]
    ends = [marks[:, :, i] for i in order[1:]] + [following]
    text = []
    total = 0.0
    for name, start, end in zip(names, [marks[:, :, i] for i in order], ends, strict=True):
        d = end - start
        total += d.mean().item()
        text.append(f"{name} {d.mean().item():.0f} (min {d.amin(0).mean().item():.0f})")
    logits = (built.stamps[:, -1, 1] - built.stamps[:, -1, 0]).double().mean().item()
    whole = (built.stamps[:, -1, 1] - built.stamps[:, 0, 0]).double().mean().item()
    times = time_step(built, step, 10)
    text.append(f"logits {logits:.0f}, whole step {whole:.0f} cycles in {times[5]:.1f} us")
    print("   cycles:", ", ".join(text), f"| layer {total:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-1b,qwen3-0.6b")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--rings", default="96", help="ring sizes in KB")
    parser.add_argument("--units", default="0", help="units of 16 cached tokens in flight; 0: what fits")
    parser.add_argument("--ahead", default="0", help="units that come into the L2 before there is room for them")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--copies", default="4")
    parser.add_argument("--brief", action="store_true", help="check only the first variant of each run")
    parser.add_argument("--stamps", action="store_true")
    args = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for name in args.models.split(","):
        shape = plans.PRESETS[name]
        weights = reference.random_weights(shape, 1, "cuda")
        contexts = [int(c) for c in args.contexts.split(",")]
        rotary = rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), max(contexts) + 64, "cuda")
        base: DenseStep | None = None
        for ring, units, ahead, copies in itertools.product(
            args.rings.split(","),
            map(int, args.units.split(",")),
            map(int, args.ahead.split(",")),
            map(int, args.copies.split(",")),
        ):
            for stamps in (0, 16) if args.stamps else (0,):
                plan = plans.DensePlan(
                    shape,
                    ring_limit=int(ring) * 1024,
                    units=units,
                    ahead=ahead,
                    stamps=stamps,
                    copies=copies,
                )
                start = time.time()
                base = DenseStep(plan, weights, rotary)
                label = f"{name} ring {ring} units {units} ahead {ahead} copies {copies}"
                attributes = [function.attributes() for function in base.functions]
                if stamps == 0:
                    print(f"== {label}: built in {time.time() - start:.1f} s {attributes}", flush=True)
                if not args.no_check and stamps == 0:
                    cases = [[[1023]], [[0]], [[5], [700, 701, 702], [63]], [[i * 101] for i in range(8)]]
                    for i, positions in enumerate(cases):
                        if max(p[-1] for p in positions) < len(rotary):
                            error, written = check_case(base, weights, positions, (1, 16)[i % 2], 10 + i)
                            print(
                                f"   check {positions}: logits {error:.2e}, keys and values {written:.2e}", flush=True
                            )
                    args.no_check = args.brief
                for context in contexts:
                    for rows in map(int, args.rows.split(",")):
                        step, pools = make_case(shape, [[context - 1]] * rows, 16, 3)
                        base.bind(pools, 16)
                        if stamps:
                            print(f"   {label} rows {rows} context {context}")
                            show_stamps(base, step)
                            continue
                        times = time_step(base, step)
                        size = shape.weight_bytes() + rows * shape.kv_bytes(context)
                        middle = times[len(times) // 2]
                        print(
                            f"{label} rows {rows} context {context}: {middle:.1f} us (min {times[0]:.1f}), "
                            f"floor {size / CEILING * 1e6:.1f}, {100 * size / CEILING * 1e6 / middle:.1f} %",
                            flush=True,
                        )
                        del pools
                del base
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
