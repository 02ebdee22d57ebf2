"""Tensor parallelism on the GPUs of one host: sums of rows over the ranks, and whole decode steps through the engine.

    python benchmarks/tensor_parallel.py sums --tp 2      # pushed sums beside NCCL's, microseconds each
    python benchmarks/tensor_parallel.py steps --tp 1,2   # Qwen3-8B's shape: step time by number of GPUs

A sum is that of a decoder layer: all-reduce of a few bfloat16 rows, addition to the residual stream, RMSNorm. `general`
is lowlat's one kernel by pushes, `nccl` an all-reduce by NCCL and a kernel for the rest. Both run in CUDA graphs, many
in a row, in alternation; a sample is one replay divided by its sums, on rank 0's GPU.

Steps are those of the engine with scheduler, sampling and run-ahead, random weights, greedy, after a prompt that was
really computed; a sample is the time between two steps' tokens. `nccl` is the same engine with NCCL for all sums.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowlat.bench.presets import find_shape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.bench.results import Row, Simulated, default_directory, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat.engine import build, ranks
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.device_build import device_ops
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.layers import push_sums
from lowlat.layers.row_sums import CommunicatorSums, RowSums
from lowlat.layers.triton.early import starts_early
from lowlat.models.loading import checkpoint as checkpoints
from lowlat.parallel.group import TorchGroup
from lowlat.parallel.peer_memory import PeerMemoryError

SUMS = [(1, 4096), (6, 4096), (8, 7168), (16, 4096), (64, 4096)]
"""Rows and width."""
IN_A_ROW = 40
"""Sums of one graph."""
ENV_NCCL = "LOWLAT_BENCH_NCCL"
"""Set where engines must not push."""


# --- sums ------------------------------------------------------------------------------------------------------------


def sums_rank(rank: int, size: int, folder: str, rounds: int, output: str) -> None:
    """One rank's process; rank 0 writes the rows to `output`."""
    group: TorchGroup = ranks.join_group(folder, rank, size, 30.0, "cuda")
    device = torch.device("cuda", rank)
    rows: list[Row] = []
    for count, width in SUMS:
        others = CommunicatorSums(group, device_ops(device)[0])
        pushes = push_sums.PushSums(group, others, width, torch.bfloat16, device, early_start=starts_early(device))
        arms = {"general": graph_of(pushes, count, width, device), "nccl": graph_of(others, count, width, device)}
        group.all_reduce(torch.zeros(1))
        measured = alternate({name: lambda graph=graph: replays(graph, 20) for name, graph in arms.items()}, rounds)
        pushes.check()
        group.all_reduce(torch.zeros(1))
        for name in arms:
            sent = count * width * 2
            rows.append(
                row_from_samples(
                    measured.samples(name), workload=f"sum-add-norm-{width}", arm=name, metric="region_us", rows=count,
                    tp=size, dtype="bfloat16", note=f"{sent} bytes of a rank; {IN_A_ROW} in a row in a CUDA graph",
                )
            )  # fmt: skip
            if rank == 0:
                row = rows[-1]
                print(f"[{count}, {width}] {name:8} {row.median:7.2f} us [{row.low:.2f}, {row.high:.2f}]", flush=True)
        arms.clear()
    if rank == 0:
        Path(output).write_bytes(msgspec.json.encode(rows))
    torch.cuda.synchronize()
    group.close()


def graph_of(sums: RowSums, rows: int, width: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """Sums one after another, each of what stood before it."""
    x_RH = torch.zeros(rows, width, device=device).bfloat16()  # NCCL sums in place, which would grow without end
    residual_RH = torch.randn(rows, width, device=device).bfloat16()
    weight_H = torch.ones(width, device=device).bfloat16()
    for _ in range(2):
        sums.reduce_add_norm(x_RH.clone(), residual_RH, weight_H, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_ROW):
            sums.reduce_add_norm(x_RH, residual_RH, weight_H, 1e-6)
    graph.kept = (x_RH, residual_RH, weight_H)  # type: ignore[attr-defined]
    return graph


def replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Microseconds of a sum, one sample a replay."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return [1e3 * first.elapsed_time(second) / IN_A_ROW for first, second in pairwise(marks)]


def measure_sums(sizes: list[int], rounds: int) -> list[Row]:
    """Rows of every size, each by processes of its own."""
    rows: list[Row] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            output = str(Path(folder, "rows"))
            command = [sys.executable, __file__, "sums-rank", "--tp", str(size), "--folder", folder]
            command += ["--rounds", str(rounds), "--output", output]
            running = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
            codes = [process.wait(timeout=300) for process in running]
            if any(codes):
                sys.exit(f"ranks ended with {codes}")
            rows += msgspec.json.decode(Path(output).read_bytes(), type=list[Row])
    return rows


# --- steps -----------------------------------------------------------------------------------------------------------


def use_random_weights() -> None:
    """Let engines in this process open a shape's name as a checkpoint of random weights, drawn on their GPU."""

    def opened(model: str, **_: Any) -> Any:
        where = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        checkpoint: Any = RandomCheckpoint(find_shape(model), 0, where)
        checkpoint.tokenizer = lambda: None
        return checkpoint

    checkpoints.open_checkpoint = opened
    build.open_checkpoint = opened
    if os.environ.get(ENV_NCCL):

        class NoPushes:
            def __init__(self, *_: Any, **__: Any) -> None:
                raise PeerMemoryError("the benchmark asked for NCCL")

        push_sums.PushSums = NoPushes  # type: ignore[assignment,misc]


def measure_steps(model: str, size: int, batches: list[int], context: int, steps: int, device: str) -> list[Row]:
    """Rows of one engine."""
    arm = "nccl" if os.environ.get(ENV_NCCL) else "general"
    config = EngineConfig(
        model=model, device=device, dtype="bfloat16", tensor_parallel=size, max_batch=max(batches), run_ahead=2,
        max_context=context + 2 * steps + 64, kv_tokens=max(batches) * (context + 2 * steps + 128), low_latency="off",
        prefix_cache=False, seed=0,
    )  # fmt: skip
    started = time.perf_counter()
    core, _, _ = build.build_engine(config, lambda *_: None)
    print(f"{model}, TP {size}, {arm}: ready in {time.perf_counter() - started:.1f} s", flush=True)
    rows = []
    try:
        for batch in batches:
            samples = decode(core, batch, context, steps, find_shape(model).vocab)
            row = row_from_samples(
                samples, workload=model, arm=arm, metric="step_us", rows=batch, context=context, tp=size,
                dtype="bfloat16", concurrency=batch,
                note="engine in process: scheduler, sampling, run-ahead 2; the context was computed",
            )  # fmt: skip
            rows.append(row)
            print(f"   {batch} requests: {row.median:8.1f} us [{row.low:.1f}, {row.high:.1f}]", flush=True)
    finally:
        core.close()
    return rows


def decode(core: EngineCore, batch: int, context: int, steps: int, vocabulary: int) -> list[float]:
    """Microseconds between the tokens of `steps` steps of `batch` requests."""
    sampling = SamplingParams(max_tokens=2 * steps + 40, temperature=0, ignore_eos=True)
    for request in range(batch):
        prompt = [(request * 7919 + place * 31) % (vocabulary - 3) + 3 for place in range(context)]
        core.submit(GenerateRequest(id=str(request), prompt_ids=prompt, sampling=sampling))
    quiet = 0
    while quiet < 20:  # steps of decodes of all
        quiet = quiet + 1 if len(core.turn()) == batch else 0
    samples, last = [], time.perf_counter()
    for _ in range(steps):
        assert len(core.turn()) == batch
        now = time.perf_counter()
        samples.append((now - last) * 1e6)
        last = now
    for request in range(batch):
        core.abort(str(request))
    while core.has_work:
        core.turn()
    return samples


# --- both ------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sums", "steps", "sums-rank", "steps-engine"])
    parser.add_argument("--tp", default="2", help="numbers of GPUs")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="of steps; cpu: a dry run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    for name in ("--rank", "--folder", "--output"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    got = parser.parse_args()
    sizes = [int(text) for text in got.tp.split(",")]
    batches = [int(text) for text in got.batches.split(",")]
    if got.what == "sums-rank":
        sums_rank(int(got.rank), sizes[0], got.folder, got.rounds, got.output)
        return
    if got.what == "steps-engine":
        use_random_weights()
        ranks.RANK_PROGRAM = (sys.executable, __file__, "rank")
        rows = measure_steps(got.model, sizes[0], batches, got.context, got.steps, got.device)
        Path(got.output).write_bytes(msgspec.json.encode(rows))
        return
    gpus = max(sizes) if got.device == "cuda" else 0
    simulated = Simulated(weights=True)
    name = "tensor-parallel-sums" if got.what == "sums" else "tensor-parallel-steps"
    result = new_result(name, simulated=simulated, gpus=gpus)
    if got.what == "sums":
        result.rows = measure_sums(sizes, got.rounds)
        print(save(result, got.results or default_directory()))
        return
    path: Path | None = None
    for environment in ({ENV_NCCL: ""}, {ENV_NCCL: "1"}):
        for size in sizes if not environment[ENV_NCCL] else [size for size in sizes if size > 1]:
            result.rows += in_a_process(got, size, environment)
            if path is not None:
                path.unlink()  # written again with every engine, so that a run cut short keeps what it has
            path = save(result, got.results or default_directory())
    print(path)


def in_a_process(got: argparse.Namespace, size: int, environment: dict[str, str]) -> list[Row]:
    """`measure_steps` in a process of its own, so that engines do not share a GPU's memory."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "rows"))
        command = [sys.executable, __file__, "steps-engine", "--tp", str(size), "--model", got.model]
        command += [
            "--batches",
            got.batches,
            "--context",
            str(got.context),
            "--steps",
            str(got.steps),
            "--device",
            got.device,
        ]
        subprocess.run([*command, "--output", output], env={**os.environ, **environment}, check=True, timeout=240)
        return msgspec.json.decode(Path(output).read_bytes(), type=list[Row])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        use_random_weights()
        ranks.main()
    else:
        main()
