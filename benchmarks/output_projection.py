"""The output projection that publishes its tiles beside GEMM, one-shot all-reduce and fused rebuild, in one run.

    python benchmarks/output_projection.py --ranks 4

starts one process a GPU. Arms: `lowlat-nvidia`, two overlapped launches; `general`, the same GEMM core, all-reduce
(push and take) and rebuild as kernels one after the other; `torch-eager-graph`, the same GEMM core, NCCL, and the same
rebuild. Weights are random; four sets take turns. A sample is the slowest rank's time of one graph of 16 steps,
divided by 16. All arms are compared with a float32 reference first.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/nvidia"))
from output_kit import make_residual, make_weights
from ranks import exchange, join, slowest
from variants import verdict

from lowlat.bench.results import Simulated, check_folder, new_result, row_from_samples, save
from lowlat_nvidia.comm.output_projection import OutputPlan, OutputProjection, reference
from lowlat_nvidia.comm.peers import PeerBuffer

SETS, PASSES = 4, 4


def nccl_step(one: OutputProjection, z: torch.Tensor, residual: Any) -> None:
    """GEMM, NCCL, rebuild."""
    stream, plan, rows = torch.cuda.current_stream().cuda_stream, one.plan, len(z)
    projection = one.parameters(z, residual, 2, partial=one.partial_RH)
    one._project.launch_early(plan.blocks, plan.threads, projection, stream, dependent=False)
    one.sum_RH.copy_(one.partial_RH)
    half = one.sum_RH[:rows].bfloat16()
    dist.all_reduce(half)
    one.sum_RH[:rows] = half
    rebuild = one.parameters(z, residual, 3, summed=one.sum_RH)
    one._consume.launch_early(32, plan.consume_threads, rebuild, stream, dependent=False)


def worker(rank: int, ranks: int, inputs: int, rows: int, rounds: int, results: str, port: int) -> None:
    """One rank."""
    join(rank, ranks, port)
    plan = OutputPlan(inputs=inputs, ranks=ranks)
    error = PeerBuffer(4096, rank, exchange)
    cases = []
    for number in range(SETS):
        torch.manual_seed(number * 100 + rank)
        raw, scale, meant = make_weights(plan, "cuda")
        z = torch.randn(rows, inputs, device="cuda").bfloat16()
        torch.manual_seed(number)
        residual = make_residual(plan, rows, "cuda")
        inbox = PeerBuffer(plan.inbox_bytes, rank, exchange)
        one = OutputProjection(plan, raw, scale, rank, inbox.addresses, error.addresses)
        everybody: list[Any] = [[torch.empty_like(t) for _ in range(ranks)] for t in (z, meant)]
        for found, own in zip(everybody, (z, meant), strict=True):
            dist.all_gather(found, own)
        expected, streams = reference(*everybody, residual, one.eps)
        cases.append((one, z, residual, expected, streams, inbox))
    arms: dict[str, Callable[[Any], object]] = {
        "lowlat-nvidia": lambda case: case[0].run(case[1], case[2]),
        "general": lambda case: case[0].run_plain(case[1], case[2]),
        "torch-eager-graph": lambda case: nccl_step(case[0], case[1], case[2]),
    }
    graphs = {}
    for name, run in arms.items():
        for case in cases:
            case[0].out_RH.fill_(float("nan"))
            dist.barrier()
            run(case)
            torch.cuda.synchronize()
            OutputProjection.explain(error.read_word(0))
            for mine, theirs in ((case[0].out_RH[:rows], case[3]), (case[0].streams_RNH[:rows], case[4])):
                distance = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
                assert distance < 5e-3, f"{name} is {distance} from the reference"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for case in cases * PASSES:
                run(case)
        graphs[name] = graph
    samples = slowest(graphs, rounds, SETS * PASSES)
    OutputProjection.explain(error.read_word(0))
    if rank == 0:
        write(samples, plan, rows, results)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # captured NCCL calls hang when a process group is taken down


def write(samples: dict[str, list[float]], plan: OutputPlan, rows: int, results: str) -> None:
    """The result file."""
    result = new_result("output-projection", simulated=Simulated(weights=True), gpus=plan.ranks)
    for name, times in samples.items():
        row = row_from_samples(
            times, workload="output-projection", arm=name, metric="step_us", rows=rows, tp=plan.ranks, dtype="fp8",
            bytes=plan.hidden * plan.inputs, note=f"{plan.inputs} inputs a rank, {SETS} weight sets in turn",
        )  # fmt: skip
        result.rows.append(row)
        print(
            f"{plan.ranks} GPUs, {rows} rows: {name:18} {row.median:6.2f} [{row.low:.2f}, {row.high:.2f}] us",
            flush=True,
        )
    print(verdict(samples, "general"), flush=True)
    print(save(result, Path(results)), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument(
        "--inputs", type=int, default=0, help="columns of a rank; default: 8192 over the ranks, at most 4096"
    )
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    inputs = got.inputs or min(4096, 8192 // got.ranks)
    folder = str(check_folder(got.results))
    mp.spawn(worker, (got.ranks, inputs, got.rows, got.rounds, folder, 29533), nprocs=got.ranks)


if __name__ == "__main__":
    main()
