"""A model served on a GPU: seconds until it is ready, and a user's tokens over HTTP beside those in process.

    python benchmarks/served_step.py

writes a folder with random weights, starts `lowlat serve` twice, the first time without compiled kernels from earlier
runs, decodes over HTTP and then in process, there also while another request's prompt is computed. One user, greedy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lowlat.bench.local_server import local_server
from lowlat.bench.presets import find_shape
from lowlat.bench.random_model import make_folder
from lowlat.bench.results import Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import percentile
from lowlat.engine.build import build_engine
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.models.loading.checkpoint import open_checkpoint

CONTEXT = 1024
TOKENS = 400
PREFILL = 8000
SETTINGS = {"device": "cuda", "max_batch": 8, "kv_tokens": 65536, "run_ahead": 2, "low_latency": "off"}


def prompt(turn: int) -> list[int]:
    """Token ids that no other turn begins with."""
    return [(turn * 101 + place * 31) % 5000 + 3 for place in range(CONTEXT)]


def in_process(core: EngineCore, rounds: int) -> list[float]:
    """Microseconds a token of each round."""
    results = []
    for turn in range(rounds + 1):
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        core.submit(GenerateRequest(id=str(turn), prompt_ids=prompt(turn), sampling=sampling))
        times: list[float] = []
        while core.has_work:
            if any(output.token_ids for output in core.turn()):
                times.append(time.perf_counter())
        assert len(times) == TOKENS
        results.append((times[-1] - times[0]) / (TOKENS - 1) * 1e6)
    return results[1:]


def gaps_beside_a_prefill(core: EngineCore) -> list[float]:
    """Microseconds between a stream's tokens while another request's prompt is computed."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    core.submit(GenerateRequest(id="stream", prompt_ids=prompt(200), sampling=sampling))
    gaps: list[float] = []
    last, seen, turns = 0.0, False, 0
    while not seen:
        outputs = {output.id for output in core.turn()}
        seen = "other" in outputs
        if "stream" in outputs:
            now, turns = time.perf_counter(), turns + 1
            if turns > 50:
                gaps.append((now - last) * 1e6)
            last = now
            if turns == 50:
                other = [(place * 37) % 5000 + 3 for place in range(PREFILL)]
                core.submit(GenerateRequest(id="other", prompt_ids=other, sampling=SamplingParams(max_tokens=1)))
    core.abort("stream")
    while core.has_work:
        core.turn()
    return gaps


def over_http(url: str, model: str, rounds: int) -> list[float]:
    """Microseconds a token of each round, as a client sees the chunks come."""
    results = []
    for turn in range(rounds + 1):
        connection = http.client.HTTPConnection(urlparse(url).netloc, timeout=60)
        body: dict[str, Any] = {
            "model": model, "prompt": prompt(100 + turn), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        times, usage = [], 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                times.append(time.perf_counter())
            if chunk.get("usage"):
                usage = chunk["usage"]["completion_tokens"]
        connection.close()
        assert usage == TOKENS, usage
        # Bytes that are no text yet come with a later token: the whole span counts, over all tokens.
        results.append((times[-1] - times[0]) / (TOKENS - 1) * 1e6)
    return results[1:]


class Run:
    """What is measured, written after every part."""

    def __init__(self, name: str, model: str, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._result = new_result(name, simulated=Simulated(weights=True))
        self._path: Path | None = None

    def add(self, what: str, metric: str, samples: list[float], note: str, **details: float) -> None:
        """One row; `what` is told after the model."""
        row = row_from_samples(
            samples, workload=f"{self._model}{what}", arm="general", metric=metric, note=note, dtype="bfloat16",
            context=CONTEXT,
        )  # fmt: skip
        row.details = dict(details)
        self._result.rows.append(row)
        print(f"{row.workload}: {metric} {row.median:.1f} [{row.low:.1f}, {row.high:.1f}] {details}", flush=True)
        if self._path is not None:
            self._path.unlink()
        self._path = save(self._result, self._directory)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; default: the embedded model's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu: a dry run")
    parser.add_argument("--parts", default="cold,warm,process", help="what to measure")
    parser.add_argument("--beside", default="", help="what else the machine did meanwhile, for the notes")
    parser.add_argument("--scratch", type=Path, help="folder for the model and compiled kernels, kept for other parts")
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    results = check_folder(got.results)
    # A result of its own: it may be of another day than the rest, which it would replace in tables.
    name = "cold-start" if got.parts == "cold" else "served-step"
    run = Run(name, got.model, results)
    with tempfile.TemporaryDirectory(prefix="lowlat-served-") as scratch:
        measure(run, got.scratch or Path(scratch), got)


def measure(run: Run, scratch: Path, got: argparse.Namespace) -> None:
    """All parts that are asked for."""
    settings = {**SETTINGS, "device": got.device}
    folder, parts = scratch / "model", got.parts.split(",")
    if not folder.exists():
        words = got.tokenizer or open_checkpoint("smollm2").folder
        make_folder(find_shape(got.model), folder, words, dtype="bfloat16", device=got.device)
    os.environ["TRITON_CACHE_DIR"] = str(scratch / "kernels")
    arguments = ["--model", str(folder)]
    for name, value in settings.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    beside = f"; beside {got.beside}" if got.beside else ""
    if "cold" in parts:
        with local_server(arguments) as server:
            note = "from the command to /ready, weights in the file cache, no compiled kernels"
            run.add(", cold start", "ready_ms", [server.ready_s * 1e3], note + beside)
            print(server.log.read_text(errors="replace")[-1500:], flush=True)
    if "warm" in parts:
        with local_server(arguments) as server:
            note = "from the command to /ready, weights in the file cache, kernels compiled by an earlier start"
            run.add(", warm start", "ready_ms", [server.ready_s * 1e3], note + beside)
            print(server.log.read_text(errors="replace")[-1500:], flush=True)
            samples = over_http(server.url, str(folder), got.rounds)
            run.add(" over HTTP", "step_us", samples, f"{TOKENS} tokens streamed to a client of localhost")
    if "process" in parts:
        core, _, _ = build_engine(EngineConfig(model=str(folder), **settings), lambda *_: None)
        samples = in_process(core, got.rounds)
        run.add(" in process", "step_us", samples, f"{TOKENS} tokens, scheduler and run-ahead included")
        gaps = gaps_beside_a_prefill(core)
        core.close()
        note = f"gaps of one user's tokens from the submission of another's {PREFILL} tokens to its first token"
        run.add(" in process, beside a prefill", "step_us", gaps, note, p99_us=round(percentile(gaps, 0.99), 1))


if __name__ == "__main__":
    main()
