"""Two load generators against one scripted server with fixed token times: `lowlat bench serve` and aiperf.

    python benchmarks/peers/load_agreement.py --aiperf build/peers/aiperf/bin/aiperf

Both send the same number of requests with the same lengths and concurrency, in the order lowlat, aiperf, aiperf,
lowlat. Exit code 1 where a figure of the two differs by more than 1 %. Both are processes that must run when a
word arrives, so that needs a quiet machine: by how much other work delays a process is measured meanwhile and said.
Where it cannot be stopped, let this run before it: `chrt -r 1 python benchmarks/peers/load_agreement.py ...`.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests" / "bench" / "scripted_server.py"
# Long against the millisecond or two that a busy machine takes to wake a process, which is neither tool's doing.
TTFT_MS, ITL_MS = 500.0, 15.0
TOKENS, INPUT = 64, 200
TOLERANCE = 0.01
# Delays of this length in one of ten cases move the P90s of the figures by about half the tolerance.
BUSY_MS = 2.0
FIGURES = ("ttft_ms p50", "ttft_ms p90", "itl_ms p50", "itl_ms p90", "latency_ms p50", "latency_ms p90")


def aiperf_figures(aiperf: str, url: str, tokenizer: str, concurrency: int, requests: int) -> dict[str, float]:
    """Run aiperf and read its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            aiperf, "profile", "-m", "scripted", "--url", url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", tokenizer, "--use-server-token-count", "--isl", str(INPUT), "--osl", str(TOKENS),
            "--concurrency", str(concurrency), "--request-count", str(requests),
            "--warmup-request-count", str(concurrency),
            "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", folder,
            "--no-server-metrics", "--no-gpu-telemetry",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        summary = pathlib.Path(folder) / "profile_export_aiperf.json"
        if done.returncode != 0 or not summary.is_file():
            raise SystemExit(f"aiperf failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found = json.loads(summary.read_text())
    names = {"ttft_ms": "time_to_first_token", "itl_ms": "inter_token_latency", "latency_ms": "request_latency"}
    return {figure: found[names[figure.split()[0]]][figure.split()[1]] for figure in FIGURES}


def lowlat_figures(url: str, concurrency: int, requests: int, seed: int) -> dict[str, float]:
    """Run `lowlat bench serve` in a process of its own and read its result."""
    command = [
        sys.executable, "-m", "lowlat.bench.cli", "serve", "--url", url, "-c", str(concurrency), "-n", str(requests),
        "-i", str(INPUT), "-o", str(TOKENS), "--weights", "real", "--json", "--seed", str(seed),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"lowlat bench serve failed: {done.stderr[-2000:]}")
    rows = {row["metric"]: row for row in json.loads(done.stdout)["rows"]}
    speed = rows["tokens_per_s_user"]
    return {
        "ttft_ms p50": rows["ttft_ms"]["median"],
        "ttft_ms p90": rows["ttft_ms"]["details"]["p90"],
        # the median gap is the inverse of the median speed
        "itl_ms p50": 1e3 / speed["median"],
        "itl_ms p90": rows["itl_ms_p90"]["median"],
        "latency_ms p50": rows["latency_ms"]["median"],
        "latency_ms p90": rows["latency_ms"]["details"]["p90"],
    }


class Delays:
    """How much longer than its own 2 ms a piece of work takes, ten times a second while the tools run: what other work
    takes from a process that has something to do."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            start, until = time.perf_counter(), time.thread_time() + 0.002
            while time.thread_time() < until:
                pass
            self._late_ms.append((time.perf_counter() - start) * 1e3 - 2.0)

    def p90_ms(self) -> float:
        """End sampling; the P90 in milliseconds."""
        self._ended.set()
        self._thread.join()
        return sorted(self._late_ms)[int(0.9 * len(self._late_ms))]


def verdict(worst: float, late_ms: float) -> str:
    """What a user should know of the outcome; empty where the two agree."""
    if worst <= TOLERANCE:
        return ""
    if late_ms > BUSY_MS:
        return (
            f"BUSY MACHINE: other work delayed 2 ms of work by {late_ms:.1f} ms at P90 (quiet: below {BUSY_MS:g}), so "
            "this difference tells of the machine, not of the tools. Stop other work, or run this before it: chrt -r 1"
        )
    return "the machine was quiet: one of the two tools measures wrongly"


def main() -> None:
    """Compare at one and four users."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", required=True, help="the aiperf program of its own environment")
    parser.add_argument("--requests", type=int, default=24)
    arguments = parser.parse_args()
    from lowlat.models.loading.checkpoint import open_checkpoint

    tokenizer = str(open_checkpoint("smollm2").folder)
    server = subprocess.Popen(
        [sys.executable, str(SERVER), "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    worst = 0.0
    delays = Delays()
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        for users in (1, 4):
            ours, theirs = [], []
            for seed, mine in enumerate((True, False, False, True)):
                if mine:
                    ours.append(lowlat_figures(url, users, arguments.requests, seed))
                else:
                    theirs.append(aiperf_figures(arguments.aiperf, url, tokenizer, users, arguments.requests))
            for figure in FIGURES:
                a = statistics.mean(run[figure] for run in ours)
                b = statistics.mean(run[figure] for run in theirs)
                worst = max(worst, abs(a / b - 1.0))
                print(f"{users} users  {figure:15}  lowlat {a:9.3f}  aiperf {b:9.3f}  {a / b - 1.0:+.2%}")
    finally:
        server.terminate()
        server.wait(timeout=10)
    late_ms = delays.p90_ms()
    print(
        f"largest difference {worst:.2%}, allowed {TOLERANCE:.0%}; a sleeping process woke {late_ms:.2f} ms late (P90)"
    )
    if problem := verdict(worst, late_ms):
        raise SystemExit(problem)


if __name__ == "__main__":
    main()
