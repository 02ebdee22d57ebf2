"""`lowlat bench step`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lowlat.bench.commands.common import AsJson, Folder, Save, finite, numbers, plain_errors
from lowlat.bench.keeper import Keeper, finish
from lowlat.bench.progress import say
from lowlat.bench.step_options import LEAST_CEILING_GB, MOST_CEILING_GB, MOST_STEPS, MOST_THREADS, StepOptions

EPILOG = """
Examples:

  lowlat bench step --model tiny                                      try it: a few seconds on any machine

  lowlat bench step --model smollm2 --model-folder smollm2 --threads 1    real weights

  lowlat bench step --model llama-1b --device cuda --arms torch-compile,vllm,read-floor --rows 1,8 --context 1024,8192

  lowlat bench step --model llama-1b,qwen3-8b --device cuda --save \\
    --arms general,lowlat-nvidia,torch-eager-graph,torch-compile,transformers,read-floor

  lowlat bench step --model deepseek-v41 --arms read-floor --rows 6 --tp 4 --device cuda    bytes and floor alone

  lowlat bench step --model deepseek-v41-tiny --layers 3 --arms general --context 64

  lowlat bench step --model deepseek-v41 --layers 1 --model-folder /tmp/v41 --random-folder --arms general --context 2

Models: llama-1b, qwen3-0.6b, qwen3-8b, smollm2, deepseek-v41, deepseek-v41-tiny, tiny, or a folder with a config.json.
Arms: general, torch-eager-graph, torch-compile, transformers, vllm, sglang, read-floor, and kernel libraries as
lowlat-NAME or plugin:NAME; an arm that cannot run is named and left out. Arms alternate in one run (A B B A); the read
ceiling is measured before and after.
"""


def step(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Presets or folders with a config.json, by commas.")
    ] = "smollm2",
    model_folder: Annotated[
        str | None,
        typer.Option("--model-folder", help="Real weights for the arms that take them: a folder or `smollm2`."),
    ] = None,
    random_folder: Annotated[
        bool, typer.Option("--random-folder", help="The folder's weights are random (`make-model`).")
    ] = False,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Keep only so many layers.")] = None,
    arms: Annotated[
        str, typer.Option("--arms", help="Arms joined by commas.")
    ] = "general,torch-eager-graph,read-floor",
    rows: Annotated[str, typer.Option("--rows", help="Requests in a step, one row each, e.g. 1,8.")] = "1",
    context: Annotated[str, typer.Option("--context", help="Tokens in each request's cache, e.g. 1024,8192.")] = "1024",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16; default: float32 on a CPU, else bfloat16."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks, for the byte counts of the read-floor arm.")] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads; default: torch's own choice.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of A B B A.")] = 8,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, max=MOST_STEPS, help="Steps in each measurement; a round holds two for each arm."
        ),
    ] = 5,
    ceiling_gb: Annotated[
        float | None,
        typer.Option(
            "--ceiling-gb",
            min=LEAST_CEILING_GB,
            max=MOST_CEILING_GB,
            callback=finite,
            help="Buffer of the read ceiling, GB; default: 8.6 on a GPU, 0.5 on a CPU.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of random weights.")] = 0,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Time one decode step of several implementations, side by side, against the bytes it must read."""
    with plain_errors():
        import torch

        from lowlat.bench.local_server import ended_by_signals
        from lowlat.bench.step import run_step

        if threads is not None:
            torch.set_num_threads(threads)
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        options = StepOptions(
            model=model, model_folder=model_folder, random_folder=random_folder, layers=layers,
            arms=tuple(filter(None, arms.split(","))),
            rows=numbers(rows, "--rows"), contexts=numbers(context, "--context"),
            dtype=dtype or ("float32" if place == "cpu" else "bfloat16"), device=place, tp=tp, rounds=rounds,
            steps=steps, seed=seed, ceiling_gb=ceiling_gb,
        )  # fmt: skip
        with ended_by_signals(), Keeper(save, results, as_json=as_json) as kept:
            outcome = run_step(options, say, begun=kept.begin, measured=lambda outcome: kept(outcome.result))
            finish(outcome.result, as_json=as_json, kept=kept)
        for name, reason in outcome.unavailable.items():
            print(f"{name} was left out: {reason}", file=sys.stderr)
