"""Speed of scores on a CPU: all items in one sequence, one sequence an item, and one prefill an item, in one run.

SmolLM2 in float32, one thread, the engine in process. Every request brings a new query of 256 tokens (cold) and 2 to 16
items of 8 tokens; 1 or 8 requests at once, and the time until all are answered. Arms: `mis`, all items in one sequence;
`sis`, one sequence an item in its best form, the query once and then all items in one batch; `prefill`, one whole
prefill an item, which is what a client without a score route pays. The arms alternate. Beside wall times, the rows hold
the process's own CPU time, which a busy machine disturbs less.

    python benchmarks/score_speed.py --save
    python benchmarks/score_speed.py --items 2 --items 16 --item-tokens 64 --concurrency 1 --rounds 2
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import msgspec

from lowlat.bench import results, stats
from lowlat.engine.request import GenerateRequest
from lowlat.engine.score_waves import ScoreWaves
from lowlat.engine.scoring import Mode, ScoreInput, ScoreLimits, plan_score
from lowlat.offline import Engine

LABELS = [330, 605]
ARMS = ("mis", "sis", "prefill")


class Bench:
    """One engine, and a supply of requests that it has never seen."""

    def __init__(self, query_tokens: int, item_tokens: int) -> None:
        # Room for every sequence of `sis`, so that it is not held back.
        self.engine = Engine(
            model="smollm2", dtype="float32", threads=1, kv_tokens=65536, max_batch=64, low_latency="off"
        )
        facts, config = self.engine.facts, self.engine.config
        self.limits = ScoreLimits(
            max_context=facts.max_context,
            max_batch=config.max_batch,
            page_size=facts.page_size,
            chunk_tokens=config.chunk_tokens,
            item_tokens=facts.item_tokens,
        )
        self.query_tokens, self.item_tokens = query_tokens, item_tokens
        self.random = random.Random(0)
        self.numbers = 0
        self.cpu_s: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def ids(self, count: int) -> list[int]:
        """Random tokens; none is a control token of SmolLM2."""
        return [self.random.randrange(100, 40_000) for _ in range(count)]

    def asked(self, items: int) -> ScoreInput:
        """A new request."""
        return ScoreInput(
            query=self.ids(self.query_tokens),
            items=[self.ids(self.item_tokens) for _ in range(items)],
            labels=[LABELS],
        )

    def run(self, arm: str, requests: list[ScoreInput]) -> list[list[list[list[float]]]]:
        """Score all requests at once; the log-probabilities of each."""
        everyone = [waves for asked in requests for waves in self._waves(arm, asked)]
        core, owners = self.engine._core, {}

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
        self.cpu_s[arm].append(time.process_time() - cpu)
        return (time.perf_counter() - begin) * 1e3

    def check(self) -> None:
        """All arms say the same, within float32's rounding of log-probabilities."""
        requests = [self.asked(5) for _ in range(2)]
        first, *others = [self.run(arm, requests) for arm in ARMS]
        for other in others:
            for one, two in zip(_flat(first), _flat(other), strict=True):
                assert abs(one - two) < 1e-3, (one, two)


def _flat(readings: list[list[list[list[float]]]]) -> list[float]:
    return [value for request in readings for item in request for place in item for value in place]


def measure(bench: Bench, result: results.Result, items: int, concurrency: int, arguments: argparse.Namespace) -> None:
    """Measure one point of the grid and append its rows: times by arm, and the ratios that count."""
    bench.cpu_s = {arm: [] for arm in ARMS}
    rounds: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for number in range(arguments.rounds):
        # One prefill an item takes many times as long and is far from its bound: once a round, in the first rounds.
        order = ["mis", "sis", *(["prefill"] if number < arguments.slow_rounds else []), "sis", "mis"]
        for arm in order:
            print(f"{items} items, {concurrency} at once, round {number + 1}: {arm}", file=sys.stderr, flush=True)
            sample = bench.measure(arm, items, concurrency)
            if len(rounds[arm]) <= number:
                rounds[arm].append([])
            rounds[arm][number].append(sample)
    shape: dict[str, Any] = {
        "concurrency": concurrency,
        "input_tokens": bench.query_tokens,
        "output_tokens": 0,
        "dtype": "float32",
        "arm": "general",
    }
    workload = f"smollm2, {items} items of {bench.item_tokens} tokens"
    common: dict[str, int | float | str | bool] = {"items": items, "item_tokens": bench.item_tokens}
    for arm in filter(rounds.__getitem__, ARMS):
        samples = [sample for one_round in rounds[arm] for sample in one_round]
        details = {**common, "cpu_ms": 1e3 * stats.percentile(bench.cpu_s[arm], 0.5)}
        result.rows.append(
            results.row_from_samples(
                samples, metric="latency_ms", workload=f"{workload}, {arm}", details=details, **shape
            )
        )
    for slower, faster in (("sis", "mis"), ("prefill", "mis"), ("prefill", "sis")):
        if not rounds[slower]:
            continue
        ratio = stats.ratio_interval(rounds[slower], rounds[faster][: len(rounds[slower])])
        cpu = stats.percentile(bench.cpu_s[slower], 0.5) / stats.percentile(bench.cpu_s[faster], 0.5)
        result.rows.append(
            results.row_from_interval(
                ratio,
                metric="speedup",
                workload=f"{workload}, {faster} over {slower}",
                details={**common, "cpu": cpu},
                **shape,
            )
        )


def main() -> None:
    """Measure the grid, print it, and write a result file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of mis and sis, two samples each")
    parser.add_argument("--slow-rounds", type=int, default=1, help="of one prefill an item; 0: not at all")
    parser.add_argument("--query-tokens", type=int, default=256)
    parser.add_argument("--item-tokens", type=int, default=8)
    parser.add_argument("--items", type=int, action="append", help="may be given several times; default 2, 4, 8, 16")
    parser.add_argument("--concurrency", type=int, action="append", help="default 1, 8")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it under benchmarks/results")
    arguments = parser.parse_args()
    bench = Bench(arguments.query_tokens, arguments.item_tokens)
    bench.check()
    result = results.new_result("score-speed", simulated=results.Simulated(weights=False), gpus=0)
    for concurrency in arguments.concurrency or (1, 8):
        for items in arguments.items or (2, 4, 8, 16):
            measure(bench, result, items, concurrency, arguments)
    bench.engine.close()
    if arguments.save:
        print(results.save(result), file=sys.stderr)
    if arguments.json:
        print(msgspec.json.encode(result).decode())
        return
    for row in result.rows:
        cpu = row.details.get("cpu", row.details.get("cpu_ms"))
        print(
            f"{row.concurrency} at once, {row.workload:50} {row.median:9.2f} "
            f"({row.low:.2f} to {row.high:.2f}); CPU {cpu:.2f}"
        )


if __name__ == "__main__":
    main()
