"""The general path on a GPU beside plain and compiled PyTorch in CUDA graphs: decode steps, all arms in one run.

    python benchmarks/general_step.py

takes a few minutes on an H200. Three arms share the weights and the memory of the cache, and are measured in
alternation:

- `general`: the engine in this process, with scheduler, sampling and run-ahead; a sample is the time between two
  steps' tokens.
- `torch-eager-graph`, `torch-compile`: the same decoder as an ordinary user writes it, packed projections, QK-norm
  where the model has it, attention over exactly `context` tokens, argmax; one replay of a CUDA graph. It is compiled
  layer by layer, with the addition before each norm inside; `plain_decoder.py` compiles all cases side by side first.

The details of the engine's rows hold which kernels its start chose and what they took then, as its log has it: of steps
of as many requests as the largest case has.

A kernel library's arm (`--arms lowlat-nvidia,...`) is the same engine with the library's steps switched on, for the
same requests; its row's details hold the time of the library's forward alone, replayed as a graph, behind as many
tokens as the requests had in the middle of that.

Contexts are not computed: cached prefixes are declared and their keys and values drawn at random. The file is written
again after every case.

Legend of shape suffixes: B requests (one row each), H hidden, N query heads, K KV heads, D head dimension, L tokens.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from plain_decoder import PlainDecoder, compile_side_by_side

from lowlat.bench.arms.base import kernel_library
from lowlat.bench.arms.torch_step import capture, time_cpu, time_cuda
from lowlat.bench.ceiling import Ceiling, measure_ceiling
from lowlat.bench.presets import DenseShape, find_shape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.bench.results import Result, Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.roofline import dense_step_bytes
from lowlat.bench.stats import Alternation, alternate
from lowlat.cache.layout import KVPool
from lowlat.engine.build import RankParts, build_rank, make_executor, make_scheduler
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.models.decoder import Decoder
from lowlat.parallel.group import SingleRank
from lowlat_plugin import Mode, StepInputs
from lowlat_plugin import Path as RoutePath

PAGE = 16
ANSWER = 512
"""Most tokens that a case's requests may generate."""
LONG = 10_000
SLOW_US = 200_000
"""A step of PyTorch's that takes longer is left out."""
NEW_TOKENS = 700
"""Tokens of a follow-up over a cached prefix, the common request of agents."""

SAMPLING = {
    "greedy": SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=ANSWER, temperature=0.8, seed=1, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=ANSWER, temperature=0.8, top_k=50, top_p=0.95, seed=1, ignore_eos=True),
}
Arm = Callable[[], list[float]]


class Options(msgspec.Struct, frozen=True):
    """What to measure."""

    device: str
    dtype: str
    models: list[str]
    batches: list[int]
    contexts: list[int]
    arms: list[str]
    rounds: int
    steps: int
    ceiling_gb: float | None
    sampling: str = "greedy"
    long_batches: list[int] | None = None
    """Requests that decode at a time over contexts beyond `LONG`; None: as for others."""

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(requests, context)."""
        long = self.batches if self.long_batches is None else self.long_batches
        return [(batch, context) for context in self.contexts for batch in (long if context > LONG else self.batches)]

    @property
    def kernels_arm(self) -> str | None:
        """The arm that is a kernel library, if any."""
        return next((arm for arm in self.arms if kernel_library(arm)), None)


class Engine:
    """One model in the engine, with a pool that holds the largest case."""

    def __init__(self, shape: DenseShape, options: Options) -> None:
        most = max(batch for batch, _ in options.cases)
        rooms = {context: -(-(context + NEW_TOKENS + ANSWER + PAGE) // PAGE) * PAGE for context in options.contexts}
        room = max(rooms.values())
        shape = msgspec.structs.replace(shape, max_context=max(shape.max_context, room))
        self.config = EngineConfig(
            model=shape.name,
            dtype=options.dtype,
            device=options.device,
            max_batch=most,
            kv_tokens=max(batch * rooms[context] for batch, context in options.cases),
            page_size=PAGE,
            run_ahead=2,
            low_latency="off" if options.kernels_arm is None else "require",
            kernels=None if options.kernels_arm is None else kernel_library(options.kernels_arm),
            seed=0,
        )
        checkpoint: Any = RandomCheckpoint(shape, 0, options.device)
        self.parts: RankParts = build_rank(self.config, checkpoint, SingleRank(), lambda *_: None)
        self.shape, self.sampling = shape, options.sampling
        runner = self.parts.runner
        self.chosen = runner.chosen if isinstance(runner, DeviceRunner) else {}
        """Which kernels the start chose."""
        model, kv = runner.model, runner.kv
        self.decoder: Decoder = getattr(model, "decoder", model)
        assert isinstance(kv, KVPool)
        self.kv = kv
        for tensor in kv.keys + kv.values:
            tensor.normal_()

    def case(self, batch: int, context: int) -> EngineCase:
        """An engine whose `batch` requests find `context` tokens cached."""
        scheduler = make_scheduler(self.config, self.parts)
        core = EngineCore(
            scheduler, make_executor(self.parts), run_ahead=self.config.run_ahead, low_latency=self.parts.kernels.low
        )
        return EngineCase(core, self.shape, batch, context, self.sampling)

    def launch_alone(self, batch: int, context: int, steps: int) -> list[float]:
        """Microseconds of the kernel library's forward for rows behind so many tokens, with pages in a row as the
        engine has them; its graph replayed `steps` times."""
        device, pages = self.kv.keys[0].device, context // PAGE + 1
        place = torch.full((batch,), context, device=device)
        table_QP = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
        step = StepInputs(
            Mode.DECODE, place * 7 % self.shape.vocab, place,
            torch.arange(batch + 1, dtype=torch.int32, device=device), (place + 1).int(), table_QP,
            table_QP[:, -1].long() * PAGE + context % PAGE,
        )  # fmt: skip
        with torch.inference_mode():
            return time_cuda(capture(lambda: self.parts.kernels.low.forward(step)).replay, steps)


class EngineCase:
    """Requests that decode for as long as anybody measures."""

    def __init__(self, core: EngineCore, shape: DenseShape, batch: int, context: int, sampling: str) -> None:
        self.core = core
        self._batch = batch
        self._shape = shape
        self._prompts = [
            [(request * 7919 + place * 31) % (shape.vocab - 3) + 3 for place in range(context + 1)]
            for request in range(batch)
        ]
        for prompt in self._prompts:
            self._declare(prompt)
        for request, prompt in enumerate(self._prompts):
            core.submit(GenerateRequest(id=str(request), prompt_ids=prompt, sampling=SAMPLING[sampling]))
        while core.scheduler.stats.generated_tokens < 8 * batch:
            core.turn()
        assert core.scheduler.stats.cached_tokens >= batch * (context - PAGE), "contexts were computed"

    def _declare(self, prompt: list[int]) -> None:
        """Tell the prefix cache that the keys and values of a prompt's whole pages are there."""
        cache = self.core.scheduler.cache
        lease = cache.begin(prompt, reuse=False)
        cache.extend(lease, len(prompt))
        cache.end(lease, prompt[: len(prompt) // PAGE * PAGE])

    def decode(self, steps: int, kernels: bool = False) -> list[float]:
        """Microseconds between the tokens of `steps` steps, once the pipeline is full again."""
        samples: list[float] = []
        assert self.core.low_latency is not None
        self.core.low_latency.switch(kernels)
        covered = self.core.low_latency.counters.total(RoutePath.KERNELS)
        last = 0.0
        for turn in range(steps + self.core.run_ahead + 2):
            outputs = self.core.turn()
            now = time.perf_counter()
            assert len(outputs) == self._batch, "a request ended, or a step was no decode of all"
            if turn > self.core.run_ahead + 1:
                samples.append((now - last) * 1e6)
            last = now
        covered = self.core.low_latency.counters.total(RoutePath.KERNELS) - covered
        assert covered >= steps if kernels else covered == 0, "not the arm that was to be measured"
        return samples

    def follow_up(self) -> float:
        """Milliseconds from a request of `NEW_TOKENS` new tokens over a cached context to its first token."""
        new = [(place * 17) % (self._shape.vocab - 3) + 3 for place in range(NEW_TOKENS)]
        self.finish()
        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        self.core.submit(GenerateRequest(id="new", prompt_ids=self._prompts[0][:-1] + new, sampling=sampling))
        while self.core.has_work:
            self.core.turn()
        return (time.perf_counter() - started) * 1e3

    def finish(self) -> None:
        """End all requests."""
        for request in range(self._batch):
            self.core.abort(str(request))
        while self.core.has_work:
            self.core.turn()


def torch_arm(engine: Engine, batch: int, context: int, options: Options, *, compiled: bool) -> Arm:
    """Microseconds of single replays. Raises `RuntimeError` for steps that nobody would wait for."""
    step = PlainDecoder(engine.decoder, engine.kv, engine.shape, batch, context, compiled=compiled)
    with torch.inference_mode():
        for _ in range(2):
            step()
        run: Callable[[], object] = capture(step).replay if options.device == "cuda" else step

    def measure() -> list[float]:
        with torch.inference_mode():
            return time_cuda(run, options.steps) if options.device == "cuda" else time_cpu(run, options.steps)

    if options.device == "cuda" and (slow := time_cuda(run, 1)[0]) > SLOW_US:
        raise RuntimeError(f"a step takes {slow / 1e3:.0f} ms")
    return measure


def measure_case(engine: Engine, batch: int, context: int, options: Options) -> tuple[Alternation, float, int]:
    """All arms of one case, the milliseconds of a follow-up request, and the tokens that requests had in the middle."""
    case = engine.case(batch, context)
    arms: dict[str, Arm] = {"general": lambda: case.decode(options.steps)}
    if options.kernels_arm is not None:
        arms[options.kernels_arm] = lambda: case.decode(options.steps, kernels=True)
    for name in (name for name in ("torch-eager-graph", "torch-compile") if name in options.arms):
        try:
            arms[name] = torch_arm(engine, batch, context, options, compiled=name == "torch-compile")
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"   {name} broke and is left out: {error}", flush=True)
    before = case.core.scheduler.stats.generated_tokens
    measured = alternate(arms, options.rounds)
    tokens = context + (before + case.core.scheduler.stats.generated_tokens) // (2 * batch)
    follow_up = case.follow_up()
    case.core.close()
    return measured, follow_up, tokens


def rows_of(engine: Engine, batch: int, context: int, options: Options, ceiling: Ceiling) -> list[Row]:
    """The rows of one case."""
    measured, follow_up, tokens = measure_case(engine, batch, context, options)
    size = dense_step_bytes(engine.shape, requests=batch, context=context, dtype=options.dtype).total
    common: dict[str, Any] = {
        "workload": engine.shape.name, "rows": batch, "context": context, "tp": 1, "dtype": options.dtype,
        "concurrency": batch,
    }  # fmt: skip
    notes = dict.fromkeys(
        ("general", options.kernels_arm),
        f"engine in process: scheduler, {options.sampling} tokens, run-ahead 2; cached keys and values drawn at random",
    )
    rows = [
        row_from_samples(
            measured.samples(arm), arm=arm, metric="step_us", bytes=size, note=notes.get(arm, ""),
            read_ceiling_tb_s=ceiling.tb_s, **common,
        )
        for arm in measured.rounds
    ]  # fmt: skip
    for row in rows:
        row.details = dict(engine.chosen) if row.arm == "general" else {}
    if options.kernels_arm in measured.rounds and options.device == "cuda":
        alone = statistics.median(engine.launch_alone(batch, tokens, 2 * options.steps))
        row = next(row for row in rows if row.arm == options.kernels_arm)
        row.details = {"forward_us": round(alone, 1), "over_forward": round(row.median / alone, 4), "tokens": tokens}
        print(f"   {options.kernels_arm}: forward alone, of {tokens} tokens, {alone:.1f} us", flush=True)
    for arm, error in measured.errors.items():
        print(f"   {arm} broke and is left out: {error}", flush=True)
    floor = size / (ceiling.tb_s * 1e6)
    rows.append(
        Row(
            arm="read-floor", metric="step_us", median=floor, low=floor, high=floor, samples=1, bytes=size,
            ceiling_fraction=1.0, note=f"computed from the bytes and the ceiling ({ceiling.method})", **common,
        )
    )  # fmt: skip
    note = f"{NEW_TOKENS} new tokens over {context} cached, to the first token"
    rows.append(
        row_from_samples([follow_up], arm="general", metric="ttft_ms", note=note, **{**common, "concurrency": 1})
    )
    for row in rows:
        print(f"   {row.arm:18} {row.metric} {row.median:10.1f} [{row.low:.1f}, {row.high:.1f}]", flush=True)
    return rows


def run(options: Options, directory: Path) -> Path:
    """Measure everything; returns the file, which is written again after every case."""
    ceiling = measure_ceiling(options.device, gigabytes=options.ceiling_gb)
    print(f"read ceiling {ceiling.tb_s} TB/s ({ceiling.method})", flush=True)
    gpus = int(options.device == "cuda")
    result: Result = new_result(
        "general-step" if options.kernels_arm is None else "library-step",
        simulated=Simulated(weights=True),
        read_ceiling_tb_s=ceiling.tb_s,
        gpus=gpus,
    )
    path: Path | None = None
    cases = [(model, *case) for model in options.models for case in options.cases]
    if gpus and "torch-compile" in options.arms:
        started = time.perf_counter()
        for process in compile_side_by_side(cases, options.dtype, "cuda"):
            process.wait()  # engines measure which kernels are faster when they are built
        print(f"{len(cases)} cases compiled in {time.perf_counter() - started:.1f} s", flush=True)
    for model in options.models:
        started = time.perf_counter()
        engine = Engine(find_shape(model), options)
        print(f"{model}: built in {time.perf_counter() - started:.1f} s", flush=True)
        for what, found in engine.chosen.items():
            print(f"   {what}: {found}", flush=True)
        for batch, context in options.cases:
            print(f"{model}, {batch} requests, context {context}", flush=True)
            result.rows += rows_of(engine, batch, context, options, ceiling)
            if path is not None:
                path.unlink()
            path = save(result, directory)
        del engine
        torch._dynamo.reset()
        gc.collect()
        if gpus:
            torch.cuda.empty_cache()
    assert path is not None
    return path


def main(arguments: list[str] | None = None) -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", default="llama-1b,qwen3-0.6b,qwen3-8b")
    parser.add_argument("--batches", default="1,4,8", help="requests that decode at a time")
    parser.add_argument("--contexts", default="1024,100000", help="tokens in the cache, a multiple of the page size 16")
    parser.add_argument("--arms", default="torch-eager-graph,torch-compile", help="arms beside the general path")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps in one measurement; a round holds two of each arm")
    parser.add_argument("--sampling", default="greedy", choices=list(SAMPLING), help="of the engine's arms")
    parser.add_argument("--long-batches", help=f"as --batches, for contexts beyond {LONG}; default: the same")
    parser.add_argument("--ceiling-gb", type=float)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args(arguments)
    folder = check_folder(got.results)
    options = Options(
        got.device,
        got.dtype,
        got.models.split(","),
        [int(text) for text in got.batches.split(",")],
        [int(text) for text in got.contexts.split(",")],
        got.arms.split(","),
        got.rounds,
        got.steps,
        got.ceiling_gb,
        got.sampling,
    )
    if got.long_batches:
        long_batches = [int(text) for text in got.long_batches.split(",")]
        options = msgspec.structs.replace(options, long_batches=long_batches)
    turns = (1 + (options.kernels_arm is not None)) * (2 * options.rounds + 1) * (options.steps + 4) + 8
    if turns > ANSWER:
        parser.error(f"{turns} steps of a case, and its requests have {ANSWER} tokens: fewer --rounds or --steps")
    if any(context % PAGE for context in options.contexts):
        parser.error(f"--contexts: multiples of {PAGE}")
    path = run(options, folder)
    print(path)
    return path


if __name__ == "__main__":
    main()
