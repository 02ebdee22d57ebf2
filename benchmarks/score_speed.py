"""Speed of scores: all items in one sequence, one sequence an item, and one prefill an item, in one run.

The engine in process. Every request brings a new query (cold) and 2 to 16 items of 8 tokens; 1 or 8 requests at once,
and the time until all are answered. Arms: `mis`, all items in one sequence; `sis`, one sequence an item in its best
form, the query once and then all items in one batch; `prefill`, one whole prefill an item, which is what a client
without a score route pays. Arms and numbers of items alternate. Beside wall times, the rows hold the process's own CPU
time, which a busy machine disturbs less.

On a CPU: SmolLM2 in float32, a query of 256 tokens. With `--device cuda`: random weights of a shape, bfloat16, a query
of 1,024 tokens, and without the slow arm.

    python benchmarks/score_speed.py --threads 2 --save          five minutes on two quiet cores
    python benchmarks/score_speed.py --device cuda --model qwen3-0.6b --save
    python benchmarks/score_speed.py --items 2 --items 16 --item-tokens 64 --concurrency 1 --rounds 2
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from typing import Any

import msgspec

from lowlat.bench import results, stats
from lowlat.bench.presets import find_shape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat.engine.build import build_engine, build_rank, make_executor, make_scheduler
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest
from lowlat.engine.score_waves import ScoreWaves
from lowlat.engine.scoring import Mode, ScoreInput, ScoreLimits, plan_score
from lowlat.parallel.group import SingleRank

LABELS = [330, 605]
ARMS = ("mis", "sis", "prefill")


class Case(msgspec.Struct, frozen=True):
    """What is measured on which engine."""

    model: str
    device: str
    dtype: str
    threads: int
    query_tokens: int
    item_tokens: int
    chunk_tokens: int

    @property
    def random_weights(self) -> bool:
        """Whether the model is a shape only; `smollm2` is the embedded model."""
        return self.model != "smollm2"


def make_core(case: Case) -> tuple[EngineCore, ScoreLimits, int]:
    """An engine with room for every sequence of `sis`, so that it is not held back; its limits and vocabulary."""
    config = EngineConfig(
        model=case.model,
        device=case.device,
        dtype=case.dtype,
        threads=case.threads,
        chunk_tokens=case.chunk_tokens,
        kv_tokens=65536,
        max_batch=128,
        run_ahead=2 if case.device == "cuda" else 1,
        low_latency="off",
    )
    if case.random_weights:
        checkpoint: Any = RandomCheckpoint(find_shape(case.model), 0, case.device)
        parts = build_rank(config, checkpoint, SingleRank(), lambda *_: None)
        core = EngineCore(make_scheduler(config, parts), make_executor(parts), run_ahead=config.run_ahead)
        facts = parts.facts
    else:
        core, facts, _ = build_engine(config, lambda *_: None)
    limits = ScoreLimits(
        max_context=facts.max_context,
        max_batch=config.max_batch,
        page_size=facts.page_size,
        chunk_tokens=core.scheduler.chunk_tokens,
        item_tokens=facts.item_tokens,
    )
    return core, limits, facts.vocab_size


class Bench:
    """One engine, and a supply of requests that it has never seen."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.core, self.limits, vocabulary = make_core(case)
        self._tokens = (100, min(40_000, vocabulary))
        self.random = random.Random(0)
        self.numbers = 0
        self.cpu_s: dict[tuple[int, str], list[float]] = {}

    def ids(self, count: int) -> list[int]:
        """Random tokens; none is a control token of SmolLM2."""
        return [self.random.randrange(*self._tokens) for _ in range(count)]

    def asked(self, items: int) -> ScoreInput:
        """A new request."""
        return ScoreInput(
            query=self.ids(self.case.query_tokens),
            items=[self.ids(self.case.item_tokens) for _ in range(items)],
            labels=[[label % self._tokens[1] for label in LABELS]],
        )

    def run(self, arm: str, requests: list[ScoreInput]) -> list[list[list[list[float]]]]:
        """Score all requests at once; the log-probabilities of each."""
        everyone = [waves for asked in requests for waves in self._waves(arm, asked)]
        core, owners = self.core, {}

        def submit(waves: ScoreWaves) -> None:
            batch: list[GenerateRequest] = waves.next_wave()
            for request in batch:
                owners[request.id] = waves
                core.submit(request)

        for waves in everyone:
            submit(waves)
        while owners:
            for output in core.turn():
                waves = owners[output.id]
                waves.take(output)
                if output.finish_reason is not None:
                    del owners[output.id]
                    if not waves.open:
                        submit(waves)
        found = iter(everyone)
        if arm != "prefill":
            return [waves.readings for waves in found]
        return [[next(found).readings[0] for _ in asked.items] for asked in requests]

    def _waves(self, arm: str, asked: ScoreInput) -> list[ScoreWaves]:
        """What a request becomes: one plan, or for `prefill` one an item, with a salt so that nothing is shared."""
        self.numbers += 1
        if arm != "prefill":
            mode: Mode = "mis" if arm == "mis" else "sis"
            return [ScoreWaves(plan_score(asked, mode, self.limits), f"{self.numbers}", len(asked.items))]
        alone = [msgspec.structs.replace(asked, items=[item]) for item in asked.items]
        return [
            ScoreWaves(plan_score(one, "sis", self.limits), f"{self.numbers}-{n}", 1, cache_salt=f"{self.numbers}-{n}")
            for n, one in enumerate(alone)
        ]

    def measure(self, arm: str, items: int, concurrency: int) -> float:
        """Milliseconds until all of `concurrency` new requests are answered."""
        requests = [self.asked(items) for _ in range(concurrency)]
        begin, cpu = time.perf_counter(), time.process_time()
        self.run(arm, requests)
        self.cpu_s.setdefault((items, arm), []).append(time.process_time() - cpu)
        return (time.perf_counter() - begin) * 1e3

    def check(self) -> None:
        """All arms say the same, within the rounding of log-probabilities."""
        requests = [self.asked(5) for _ in range(2)]
        first, *others = [self.run(arm, requests) for arm in ARMS]
        bound = 1e-3 if self.case.dtype == "float32" else 0.1
        for other in others:
            for one, two in zip(_flat(first), _flat(other), strict=True):
                assert abs(one - two) < bound, (one, two)


def _flat(readings: list[list[list[list[float]]]]) -> list[float]:
    return [value for request in readings for item in request for place in item for value in place]


Rounds = dict[tuple[int, str], list[list[float]]]
"""By number of items and arm: the samples of every round."""


def measure(bench: Bench, concurrency: int, arguments: argparse.Namespace) -> Rounds:
    """All numbers of items at one concurrency, two samples of `mis` and `sis` a round."""
    rounds: Rounds = {}
    bench.cpu_s = {}
    for number in range(arguments.rounds * (3 if concurrency == 1 else 1)):
        for items in arguments.items:
            # One prefill an item takes many times as long and is far from its bound: once a round, in the first rounds.
            order = ["mis", "sis", *(["prefill"] if number < arguments.slow_rounds else []), "sis", "mis"]
            for arm in order:
                found = rounds.setdefault((items, arm), [])
                found += [[] for _ in range(number + 1 - len(found))]
                found[number].append(bench.measure(arm, items, concurrency))
        print(f"{concurrency} at once: round {number + 1}", file=sys.stderr, flush=True)
    return rounds


def rows_of(bench: Bench, rounds: Rounds, concurrency: int) -> list[results.Row]:
    """Times by number of items and arm, and the ratios that count."""
    case = bench.case
    workload = f"{case.model}, %d items of {case.item_tokens} tokens"
    shape: dict[str, Any] = {
        "concurrency": concurrency,
        "input_tokens": case.query_tokens,
        "output_tokens": 0,
        "dtype": case.dtype,
        "arm": "general",
    }
    cpu_ms = {key: 1e3 * stats.percentile(samples, 0.5) for key, samples in bench.cpu_s.items()}
    rows = []
    for (items, arm), of_rounds in rounds.items():
        details: dict[str, int | float | str | bool] = {"items": items, "item_tokens": case.item_tokens}
        details["chunk_tokens"] = bench.limits.chunk_tokens
        samples = [sample for one_round in of_rounds for sample in one_round]
        name = f"{workload % items}, {arm}"
        details["cpu_ms"] = cpu_ms[items, arm]
        rows.append(results.row_from_samples(samples, metric="latency_ms", workload=name, details=details, **shape))
    every = sorted({items for items, _ in rounds})
    pairs = [((n, slow), (n, fast), f"{workload % n}, {fast} over {slow}")
             for n in every for slow, fast in (("sis", "mis"), ("prefill", "mis"), ("prefill", "sis"))]  # fmt: skip
    few, many = every[0], every[-1]
    pairs.append(((many, "mis"), (few, "mis"), f"{workload % many}, time over {few} items', mis"))
    for above, below, name in pairs:
        if above in rounds and above != below:
            ratio = stats.ratio_interval(rounds[above], rounds[below][: len(rounds[above])])
            details = {"items": above[0], "item_tokens": case.item_tokens, "cpu": cpu_ms[above] / cpu_ms[below]}
            rows.append(results.row_from_interval(ratio, metric="speedup", workload=name, details=details, **shape))
    return rows


def read_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2", help="or a shape of `lowlat bench` with random weights")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--chunk-tokens", type=int, help="default: 512 on a CPU, 2,048 on a GPU")
    parser.add_argument("--rounds", type=int, default=2, help="two samples of mis and sis each; alone, thrice as many")
    parser.add_argument("--slow-rounds", type=int, help="of one prefill an item; default: 1 on a CPU, 0 on a GPU")
    parser.add_argument("--query-tokens", type=int, help="default: 256 on a CPU, 1,024 on a GPU")
    parser.add_argument("--item-tokens", type=int, default=8)
    parser.add_argument("--items", type=int, action="append", help="may be given several times; default 2, 4, 8, 16")
    parser.add_argument("--concurrency", type=int, action="append", help="default 1, 8")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it under benchmarks/results")
    parser.add_argument("--results", type=pathlib.Path, help="write it under this folder")
    arguments = parser.parse_args()
    if arguments.save or arguments.results:
        results.check_folder(arguments.results)
    gpu = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if gpu else "float32")
    arguments.chunk_tokens = arguments.chunk_tokens or (2048 if gpu else 512)
    arguments.query_tokens = arguments.query_tokens or (1024 if gpu else 256)
    arguments.slow_rounds = (0 if gpu else 1) if arguments.slow_rounds is None else arguments.slow_rounds
    arguments.items = sorted(arguments.items or [2, 4, 8, 16])
    arguments.concurrency = arguments.concurrency or [1, 8]
    return arguments


def main() -> None:
    """Measure the grid, print it, and write a result file if asked."""
    arguments = read_arguments()
    case = msgspec.convert({name: getattr(arguments, name) for name in Case.__struct_fields__}, Case)
    bench = Bench(case)
    bench.check()
    gpus = int(case.device == "cuda")
    result = results.new_result("score-speed", simulated=results.Simulated(weights=case.random_weights), gpus=gpus)
    for concurrency in arguments.concurrency:
        # Steps of every kind come thrice before anything counts: a GPU captures those that come again.
        for _ in range(3 if gpus else 0):
            for arm in ("mis", "sis"):
                for items in arguments.items:
                    bench.measure(arm, items, concurrency)
        rows = rows_of(bench, measure(bench, concurrency, arguments), concurrency)
        result.rows += rows
        for row in rows:
            cpu = row.details.get("cpu", row.details.get("cpu_ms"))
            what = f"{row.concurrency} at once, {row.workload:50} {row.median:9.2f} ({row.low:.2f} to {row.high:.2f})"
            print(f"{what}; CPU {cpu:.2f}", file=sys.stderr, flush=True)
    bench.core.close()
    if arguments.save or arguments.results:
        print(results.save(result, arguments.results or results.default_directory()), file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
