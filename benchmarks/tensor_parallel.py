"""Tensor parallelism on the GPUs of one host: sums of rows over the ranks, and whole decode steps through the engine.

    python benchmarks/tensor_parallel.py --tp 1,2                # both
    python benchmarks/tensor_parallel.py --what sums --tp 2      # pushed sums beside NCCL's, microseconds each
    python benchmarks/tensor_parallel.py --what steps --tp 1,2   # Qwen3-8B's shape: step time by number of GPUs

A sum is that of a decoder layer: all-reduce of a few bfloat16 rows, addition to the residual stream, RMSNorm. `general`
is lowlat's one kernel by pushes, `nccl` an all-reduce by NCCL and a kernel for the rest. Both run in CUDA graphs, many
in a row, in alternation; a sample is one replay divided by its sums, on rank 0's GPU.

Steps are those of the engine with scheduler, sampling and run-ahead, random weights, greedy, after a prompt that was
really computed; a sample is the time between two steps' tokens. `nccl` is the same engine with NCCL for all sums.

All of this is made ready side by side, and then measured one after another; what is measured has the GPUs alone.
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
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat.engine import build, device_build, ranks
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.device_build import device_ops
from lowlat.engine.device_sampler import SamplingMode
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.layers import push_sums
from lowlat.layers.row_sums import CommunicatorSums, RowSums
from lowlat.layers.triton.early import starts_early
from lowlat.models.loading import checkpoint as checkpoints
from lowlat.parallel.group import TorchGroup
from lowlat.parallel.peer_memory import PeerMemoryError

SUMS = [(1, 4096), (6, 4096), (8, 7168), (64, 4096), (128, 4096)]
"""Rows and width."""
IN_A_ROW = 40
"""Sums of one graph."""
CHUNK = 64
"""Tokens of a prompt in a step: few, so that few kinds of steps have to be captured."""
ENV_NCCL = "LOWLAT_BENCH_NCCL"
"""Set where engines must not push."""


# --- turns -----------------------------------------------------------------------------------------------------------


class Turn:
    """A part's place among the others: it is ready, waits for its turn, hands over rows, waits for the end.

    Files in a folder; several processes may share a name, of which one hands over the rows.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = Path(folder), name

    def wait(self) -> None:
        """Ready: wait until it is this part's turn."""
        self._file("ready").touch()
        self._until("go")

    def give(self, rows: list[Row]) -> None:
        """What was measured."""
        self._file("new").write_bytes(msgspec.json.encode(rows))
        self._file("new").rename(self._file("rows"))

    def end(self) -> None:
        """Wait until all are done, so that nobody is disturbed by what it takes to end."""
        while not Path(self._folder, "end").exists():
            time.sleep(0.01)

    def _until(self, state: str) -> None:
        while not self._file(state).exists():
            time.sleep(0.01)

    def _file(self, state: str) -> Path:
        return self._folder / f"{self._name}.{state}"


class Part:
    """Processes that measure one thing."""

    def __init__(self, name: str, commands: list[list[str]], environment: dict[str, str]) -> None:
        self.name = name
        self._processes = [subprocess.Popen(command, env={**os.environ, **environment}) for command in commands]

    @property
    def failed(self) -> bool:
        """Whether a process has ended with an error."""
        return any(process.poll() not in (None, 0) for process in self._processes)

    def finish(self, timeout: float) -> None:
        """Wait for the processes, or end them."""
        for process in self._processes:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()


def take_turns(parts: list[Part], folder: Path, ready_s: float, took: Any) -> None:
    """Give every part that is ready within `ready_s` seconds its turn; `took` gets the rows of each."""
    end = time.monotonic() + ready_s

    def waited_for() -> list[str]:
        return [part.name for part in parts if not part.failed and not (folder / f"{part.name}.ready").exists()]

    while waited_for() and time.monotonic() < end:
        time.sleep(0.05)
    if late := waited_for():
        print(f"not ready after {ready_s:g} s, left out: {', '.join(late)}", flush=True)
    for part in parts:
        if part.name in late or part.failed:
            continue
        (folder / f"{part.name}.go").touch()
        rows = folder / f"{part.name}.rows"
        while not rows.exists() and not part.failed:
            time.sleep(0.01)
        if rows.exists():
            took(msgspec.json.decode(rows.read_bytes(), type=list[Row]))
    (folder / "end").touch()
    for part in parts:
        part.finish(0.5 if part.name in late else 20.0)


# --- sums ------------------------------------------------------------------------------------------------------------


def sums_rank(rank: int, size: int, folder: str, rounds: int, turn: Turn) -> None:
    """One rank's process; rank 0 hands over the rows."""
    group: TorchGroup = ranks.join_group(folder, rank, size, 60.0, "cuda")
    device = torch.device("cuda", rank)
    others = CommunicatorSums(group, device_ops(device)[0])
    cases = []
    for count, width in SUMS:
        pushes = push_sums.PushSums(group, others, width, torch.bfloat16, device, early_start=starts_early(device))
        graphs = {"general": graph_of(pushes, count, width, device), "nccl": graph_of(others, count, width, device)}
        cases.append((count, width, pushes, graphs))
    turn.wait()
    rows: list[Row] = []
    for count, width, pushes, graphs in cases:
        group.all_reduce(torch.zeros(1))
        measured = alternate({name: lambda graph=graph: replays(graph, 20) for name, graph in graphs.items()}, rounds)
        pushes.check()
        for name in graphs:
            row = row_from_samples(
                measured.samples(name), workload=f"sum-add-norm-{width}", arm=name, metric="region_us", rows=count,
                tp=size, dtype="bfloat16",
                note=f"{count * width * 2} bytes of a rank; {IN_A_ROW} in a row in a CUDA graph",
            )  # fmt: skip
            rows.append(row)
            if rank == 0:
                print(f"[{count}, {width}] {name:8} {row.median:7.2f} us [{row.low:.2f}, {row.high:.2f}]", flush=True)
    if rank == 0:
        turn.give(rows)
    turn.end()
    del cases, graphs
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
    device_build._USUAL[:] = [SamplingMode()]  # nothing else is measured
    if os.environ.get(ENV_NCCL):

        class NoPushes:
            def __init__(self, *_: Any, **__: Any) -> None:
                raise PeerMemoryError("the benchmark asked for NCCL")

        push_sums.PushSums = NoPushes  # type: ignore[assignment,misc]


def engine_steps(got: argparse.Namespace, size: int, turn: Turn) -> None:
    """One engine's process."""
    batches, arm = numbers(got.batches), "nccl" if os.environ.get(ENV_NCCL) else "general"
    config = EngineConfig(
        model=got.model,
        device=got.device,
        dtype="bfloat16",
        tensor_parallel=size,
        max_batch=max(batches),
        run_ahead=2,
        max_context=got.context + answer(max(batches), got.context, got.steps),
        kv_tokens=max(batches) * (got.context + answer(max(batches), got.context, got.steps) + 16),
        low_latency="off",
        prefix_cache=False,
        seed=0,
        chunk_tokens=CHUNK,
    )
    started = time.perf_counter()
    core, _, _ = build.build_engine(config, lambda *_: None)
    print(f"{got.model}, TP {size}, {arm}: ready in {time.perf_counter() - started:.1f} s", flush=True)
    turn.wait()
    try:
        rows = []
        for batch in batches:
            samples, tokens = decode(core, batch, got.context, got.steps, find_shape(got.model).vocab)
            row = row_from_samples(
                samples, workload=got.model, arm=arm, metric="step_us", rows=batch, context=got.context, tp=size,
                dtype="bfloat16", concurrency=batch,
                note="engine in process: scheduler, sampling, run-ahead 2; prompts were computed, and requests "
                "that came first are longer by the steps that others' prompts took",
            )  # fmt: skip
            rows.append(row)
            print(f"TP {size}, {arm}, {batch} requests: {row.median:8.1f} us [{row.low:.1f}, {row.high:.1f}]; ", end="")
            print(f"the first one's tokens {tokens[:6]}", flush=True)
        turn.give(rows)
        turn.end()
    finally:
        core.close()


def answer(batch: int, context: int, steps: int) -> int:
    """Tokens that the first request may generate until the last one's prompt is computed and all are measured."""
    return batch * -(-context // CHUNK) + steps + 64


def decode(core: EngineCore, batch: int, context: int, steps: int, vocabulary: int) -> tuple[list[float], list[int]]:
    """Microseconds between the tokens of `steps` steps of `batch` requests, and the first one's tokens."""
    sampling = SamplingParams(max_tokens=answer(batch, context, steps), temperature=0, ignore_eos=True)
    for request in range(batch):
        prompt = [(request * 7919 + place * 31) % (vocabulary - 3) + 3 for place in range(context)]
        core.submit(GenerateRequest(id=str(request), prompt_ids=prompt, sampling=sampling))
    quiet, tokens = 0, []
    while quiet < 20:  # steps of decodes of all
        outputs = core.turn()
        quiet = quiet + 1 if len(outputs) == batch else 0
        tokens += [token for output in outputs if output.id == "0" for token in output.token_ids]
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
    return samples, tokens


# --- both ------------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """Of a list with commas."""
    return [int(part) for part in text.split(",")]


def start(got: argparse.Namespace, folder: Path) -> list[Part]:
    """Start everything that is to be measured, the most important first."""
    sizes, parts = numbers(got.tp), []
    common = [sys.executable, __file__, *sys.argv[1:], "--turns", str(folder)]

    def steps(size: int, nccl: str) -> Part:
        name = f"steps-{size}{'-nccl' if nccl else ''}"
        return Part(name, [[*common, "--part", name, "--size", str(size)]], {ENV_NCCL: nccl})

    for size in [size for size in sizes if size > 1 and got.what != "steps"]:
        name, meeting = f"sums-{size}", folder / f"meeting-{size}"
        meeting.mkdir()
        command = [*common, "--part", name, "--size", str(size), "--folder", str(meeting)]
        parts.append(Part(name, [[*command, "--rank", str(rank)] for rank in range(size)], {}))
    if got.what != "sums":
        parts += [steps(size, "") for size in sizes]
        parts += [steps(size, "1") for size in sizes if size > 1 and "nccl" in got.arms.split(",")]
    return parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["all", "sums", "steps"], default="all")
    parser.add_argument("--tp", default="1,2", help="numbers of GPUs")
    parser.add_argument("--arms", default="general,nccl", help="of steps")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--batches", default="1,4,8", help="requests that decode at a time")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="of steps; cpu: a dry run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ready", type=float, default=300.0, help="seconds after which nobody is waited for any more")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    for name in ("--turns", "--part", "--size", "--folder", "--rank"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    got = parser.parse_args()
    results = check_folder(got.results)
    if got.part is not None:
        turn = Turn(got.turns, got.part)
        if got.rank is not None:
            sums_rank(int(got.rank), int(got.size), got.folder, got.rounds, turn)
        else:
            use_random_weights()
            ranks.RANK_PROGRAM = (sys.executable, __file__, "rank")
            engine_steps(got, int(got.size), turn)
        return
    gpus = max(numbers(got.tp)) if got.device == "cuda" else 0
    result = new_result("tensor-parallel", simulated=Simulated(weights=True), gpus=gpus)
    path: Path | None = None

    def took(rows: list[Row]) -> None:
        nonlocal path
        result.rows += rows
        if path is not None:
            path.unlink()  # written again with every part, so that a run cut short keeps what it has
        path = save(result, results)

    with tempfile.TemporaryDirectory() as folder:
        take_turns(start(got, Path(folder)), Path(folder), got.ready, took)
    print(path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        del sys.argv[1]
        use_random_weights()
        ranks.main()
    else:
        main()
