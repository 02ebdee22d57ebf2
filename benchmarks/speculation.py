"""Speculation on agent sessions: tokens a step, acceptance and speed of one user beside plain decoding, in one run.

Prompts are conversations of recorded agent sessions, the last three of each folder, in the model's chat template and
cut to their last tokens. Every prompt is answered by all arms one after the other, in an order that turns, at
temperature 0 and 0.8 with the same seed. Arms: the general path and lowlat-cpu's kernels, without guesses and with
those of each proposer; on a GPU the general path alone.

    LOWLAT_DATA=... python benchmarks/speculation.py --spec ngram --save
    LOWLAT_DATA=... python benchmarks/speculation.py --device cuda --spec dspark,ngram --rounds 2 --save
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import msgspec

from lowlat.bench import results, stats
from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.request import SamplingParams
from lowlat.engine.stats import EngineStats
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.offline import Engine
from lowlat.speculative.step_times import StepTimes
from lowlat.training.texts import Prompts, Texts


class Sample(msgspec.Struct):
    """One answer."""

    tokens: list[int]
    seconds: float
    """From the first token to the last."""
    cpu_seconds: float
    stats: EngineStats
    """What it added to the engine's counters."""

    @property
    def speed(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


_COUNTERS = ("guessed_tokens", "accepted_tokens", "decode_rows", "decode_tokens", "decode_seconds", "plain_seconds")


def answer(engine: Engine, prompt: list[int], sampling: SamplingParams) -> Sample:
    """Stream one answer and take its times."""
    before = msgspec.structs.replace(engine._core.stats())
    tokens: list[int] = []
    begin = cpu = 0.0
    for delta in engine.stream(prompt, sampling):
        if not tokens:
            begin, cpu = time.perf_counter(), time.process_time()
            first = len(delta.token_ids)
        tokens += delta.token_ids
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    after = engine._core.stats()
    added = EngineStats(**{name: getattr(after, name) - getattr(before, name) for name in _COUNTERS})
    assert first == 1, "the first token comes from the prompt's step, alone"
    return Sample(tokens, seconds, cpu, added)


def prompts_of(folder: Path, model: str, length: int) -> list[tuple[str, list[int]]]:
    """(session, prompt) of the held-out sessions of each folder."""
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    chat = checkpoint.chat(tokenizer)
    found = []
    for file in Texts([folder], hold_out=3).held_out:
        prompt = Prompts([file], tokenizer, chat, length, seed=0).draw(length, 1)[0]
        found.append((f"{file.parent.name}/{file.name[:6]}", prompt))
    return found


def step_times(engine: Engine) -> StepTimes | None:
    """What the engine measured of its steps, by rows; None where it checks no guesses."""
    executor = engine._core.executor
    if isinstance(executor, DeviceExecutor):
        verifier = executor._runner.verifier
        return None if verifier is None else verifier.speculation.times.get(1)
    speculation = executor.run.__self__.speculation
    return None if speculation is None else speculation.times


def main() -> None:
    """Measure, print, and write a result file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--spec", default="ngram", help="proposers, with commas between")
    parser.add_argument("--draft")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--arms", help="paths to measure: general and names of kernel libraries")
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results")
    parser.add_argument("--results", type=Path, help="write the result into this folder")
    arguments = parser.parse_args()
    if arguments.save or arguments.results:
        results.check_folder(arguments.results)
    data = os.environ.get("LOWLAT_DATA")
    if not data or not Path(data, "traces", "agent").is_dir():
        sys.exit("set LOWLAT_DATA to the folder that holds traces/agent")
    prompts = prompts_of(Path(data, "traces", "agent"), arguments.model, arguments.prompt_tokens)
    on_gpu = arguments.device == "cuda"
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    shared = {"model": arguments.model, "device": arguments.device, "dtype": dtype, "threads": 1, "max_batch": 1}
    shared |= {"kv_tokens": 16384, "run_ahead": 2 if on_gpu else 1}
    paths = (arguments.arms or ("general" if on_gpu else "general,lowlat-cpu")).split(",")
    specs = arguments.spec.split(",")
    engines: dict[tuple[str, str], Engine] = {}
    for path in paths:
        low = {"low_latency": "off"} if path == "general" else {"low_latency": "require", "kernels": path}
        for spec in ("off", *specs):
            draft = None if spec in ("off", "ngram") else arguments.draft
            engines[path, spec] = Engine(spec=spec, draft=draft, **shared, **low)
            table = step_times(engines[path, spec])
            if table is not None:
                times = ", ".join(f"{rows}: {seconds * 1e3:.2f}" for rows, seconds in table.table())
                print(f"{path} {spec}: milliseconds of a step by rows: {times}", file=sys.stderr, flush=True)
    for engine in engines.values():  # what comes up for the first time does not count
        for temperature in (0.0, 0.8):
            answer(engine, prompts[0][1], SamplingParams(max_tokens=32, temperature=temperature, ignore_eos=True))
    samples: dict[tuple[str, str, float], list[Sample]] = {}
    for number, (name, prompt) in enumerate(prompts * arguments.rounds):
        for temperature in (0.0, 0.8):
            sampling = SamplingParams(
                max_tokens=arguments.tokens, temperature=temperature, seed=number, ignore_eos=True
            )
            order = list(engines)
            order = order[number % len(order) :] + order[: number % len(order)]
            for arm in order if number % 2 else reversed(order):
                sample = answer(engines[arm], prompt, sampling)
                samples.setdefault((*arm, temperature), []).append(sample)
            speeds = "  ".join(f"{'/'.join(arm)} {samples[*arm, temperature][-1].speed:.1f}" for arm in engines)
            print(f"{name} at {temperature:g}: {speeds}", file=sys.stderr, flush=True)
    simulated = results.Simulated(weights=False, acceptance=False)
    result = results.new_result("speculation", simulated=simulated, gpus=int(on_gpu))
    shape = {"workload": arguments.model, "dtype": dtype, "output_tokens": arguments.tokens}
    shape["input_tokens"] = arguments.prompt_tokens
    for path in paths:
        for spec in specs:
            for temperature in (0.0, 0.8):
                plain, guessing = samples[path, "off", temperature], samples[path, spec, temperature]
                rows = rows_of(path, spec, temperature, plain, guessing, shape)
                # The plain arm stands once in the file.
                result.rows += rows if spec == specs[0] else rows[1:]
    for engine in engines.values():
        engine.close()
    for row in result.rows:
        print(
            f"{row.arm:11} {row.draft or 'plain':8} {row.workload:26} {row.metric:18} "
            f"{row.median:7.2f} ({row.low:.2f} to {row.high:.2f}) {dict(row.details) or ''}"
        )
    if arguments.save or arguments.results:
        print(results.save(result, arguments.results), file=sys.stderr)


def rows_of(
    path: str, spec: str, temperature: float, plain: list[Sample], guessing: list[Sample], shape: dict
) -> list[results.Row]:
    """Speed of both, their ratio, and tokens a step."""
    rows = []
    fields = {"arm": path, "draft": spec, "details": {"temperature": temperature}, **shape}
    fields["workload"] = f"{shape['workload']}, temperature {temperature:g}"
    for draft, of in ((None, plain), (spec, guessing)):
        speeds = [sample.speed for sample in of]
        rows.append(results.row_from_samples(speeds, metric="tokens_per_s_user", **fields | {"draft": draft}))
    pairs = [([a.seconds], [b.seconds]) for a, b in zip(plain, guessing, strict=True)]
    ratio = stats.ratio_interval([a for a, _ in pairs], [b for _, b in pairs], statistic=sum)
    cpu = sum(sample.cpu_seconds for sample in plain) / sum(sample.cpu_seconds for sample in guessing)
    same = sum(a.tokens == b.tokens for a, b in zip(plain, guessing, strict=True))
    details = {
        "temperature": temperature,
        "ratio_of_cpu_seconds": round(cpu, 3),
        "same_answers": same,
        "answers": len(plain),
    }
    note = "over plain decoding; ratio of all sessions' seconds"
    rows.append(results.row_from_interval(ratio, metric="speedup", note=note, **fields | {"details": details}))
    total = {name: sum(getattr(sample.stats, name) for sample in guessing) for name in _COUNTERS}
    lengths = [sample.stats.decode_tokens / sample.stats.decode_rows for sample in guessing]
    interval = stats.bootstrap_interval(lengths, statistics.fmean)
    details = {
        "temperature": temperature,
        "tokens_per_step": round(total["decode_tokens"] / total["decode_rows"], 3),
        "break_even": round(total["decode_seconds"] / total["plain_seconds"], 3),
        "guessed": total["guessed_tokens"],
        "accepted": total["accepted_tokens"],
        "steps": total["decode_rows"],
    }
    note = "mean of the sessions' tokens a step"
    rows.append(results.row_from_interval(interval, metric="accept_length", note=note, **fields | {"details": details}))
    return rows


if __name__ == "__main__":
    main()
