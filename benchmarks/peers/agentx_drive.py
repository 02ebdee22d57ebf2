"""AgentX's own harness drives a lowlat server, unchanged, with a few recorded runs, and must lose no request.

    python benchmarks/peers/agentx_drive.py --agentx build/peers/agentx/bin/agentx --traces TRACES/agentx

The model is a tiny random Llama of 256K context, so this proves the protocol, not a speed: no AgentX score follows from
it. Also run against the scripted server, whose token times are known.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

from lowlat.bench.local_server import local_server

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests" / "bench" / "scripted_server.py"
ITL_MS = 2.0


def drive(agentx: str, url: str, model: str, tokenizer: str, traces: pathlib.Path, longest: int, seconds: int) -> dict:
    """Run the harness for `seconds` with two lanes and read its summary. The times are too short for a score."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            agentx, "profile", "-m", model, "--url", url, "--tokenizer", tokenizer, "--input-file", str(traces),
            "--custom-dataset-type", "weka_trace", "--concurrency", "2", "--benchmark-duration", str(seconds),
            "--num-dataset-entries", "10", "--max-context-length", str(longest), "--warmup-requests-per-lane", "1",
            "--trace-idle-gap-cap-seconds", "2", "--unsafe-override", "--ui", "none", "--artifact-dir", folder,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        summary = pathlib.Path(folder) / "profile_export_aiperf.json"
        if done.returncode != 0 or not summary.is_file():
            raise SystemExit(
                f"agentx failed with code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
            )
        return json.loads(summary.read_text())


def show(name: str, found: dict) -> None:
    """Print what counts and stop where a request failed."""
    count = found["request_count"]["avg"]
    errors = found.get("error_request_count", {}).get("avg", 0)
    gap = found["inter_token_latency"]
    print(f"{name}: {count:.0f} requests, {errors:.0f} failed, time between tokens p50 {gap['p50']:.2f} ms")
    if errors or count < 2:
        raise SystemExit(f"{name}: {errors:.0f} requests failed, {count:.0f} were counted")


@contextlib.contextmanager
def scripted():
    """The scripted server."""
    command = [sys.executable, str(SERVER), "--ttft-ms", "20", "--itl-ms", str(ITL_MS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def main() -> None:
    """Drive the scripted server, then lowlat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agentx", required=True, help="the agentx program of its own environment")
    parser.add_argument("--traces", type=pathlib.Path, required=True, help="folder of trace_*.json in the AgentX form")
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--longest", type=int, default=40000, help="leave out runs with a longer context")
    arguments = parser.parse_args()
    from lowlat.models.loading.checkpoint import open_checkpoint

    tokenizer = str(open_checkpoint("smollm2").folder)
    common = (arguments.traces, arguments.longest, arguments.seconds)
    with scripted() as url:
        found = drive(arguments.agentx, url, "scripted", tokenizer, *common)
        show("scripted server", found)
        if abs(found["inter_token_latency"]["p50"] / ITL_MS - 1.0) > 0.05:
            raise SystemExit(f"the scripted time between tokens is {ITL_MS} ms")
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/model"
        make = [sys.executable, "-m", "lowlat.bench.cli", "make-model", "tiny", place, "--max-context", "262144"]
        subprocess.run([*make, "--dtype", "float32"], check=True)
        serve = ["--model", place, "--served-model-name", "tiny", "--kv-tokens", "400000", "--max-batch", "4"]
        with local_server([*serve, "--threads", "1"]) as server:
            show("lowlat", drive(arguments.agentx, server.url, "tiny", tokenizer, *common))


if __name__ == "__main__":
    main()
