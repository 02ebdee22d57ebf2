"""`lowlat bench serve`."""

from __future__ import annotations

import asyncio
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from lowlat.bench.busy import load_note
from lowlat.bench.commands.common import AsJson, Folder, Save, Weights, numbers, plain_errors, random_weights
from lowlat.bench.commands.load import (
    ApiKey,
    ArmName,
    Endpoint,
    Goodput,
    Measured,
    ModelName,
    Output,
    Timeout,
    Url,
    Workload,
    ask_target,
    endpoint_path,
    reachable,
    result_name,
    run_levels,
    targets_of,
)
from lowlat.bench.keeper import Keeper
from lowlat.bench.load.lengths import parse_lengths
from lowlat.bench.load.metrics import load_rows, summarize
from lowlat.bench.progress import telling
from lowlat.bench.results import Simulated

if TYPE_CHECKING:
    from lowlat.bench.load.records import Record
    from lowlat.bench.load.serve import ServeOptions
    from lowlat.bench.load.traces import TraceRequest

EPILOG = """
Examples:

  lowlat bench serve --concurrency 1,2,4,8 --input 8192 --output 1024

  lowlat bench serve -c 4 -i lognormal:800,0.6 -o uniform:50,400

  lowlat bench serve --rate 2 --goodput ttft=500,itl=30

  lowlat bench serve --trace azure:$LOWLAT_DATA/traces/azure_code.csv

Closed loop (--concurrency): so many users, each sends its next request at
once. Open loop (--rate, or a trace): requests leave at their times whatever
the server does. Lengths: N, fixed:N, uniform:LOW,HIGH, normal:MEAN,SD,
lognormal:MEDIAN,SIGMA. LOWLAT_DATA is the folder that holds traces/.

Exit code 1 where a request failed; the others' figures are shown and saved.
"""


def _check_lengths(text: str, option: str) -> None:
    try:
        parse_lengths(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _read_trace(text: str, limit: int) -> tuple[str, list[TraceRequest]]:
    """A trace's name and its first requests."""
    from lowlat.bench.load.traces import read_azure, read_mooncake

    kind, _, path = text.partition(":")
    readers = {"mooncake": read_mooncake, "azure": read_azure}
    if kind not in readers or not path:
        raise ValueError(f"--trace {text!r}: write mooncake:FILE or azure:FILE")
    name = pathlib.Path(path).stem.replace("_", " ")
    return (name if name.startswith(kind) else f"{kind} {name}"), readers[kind](path, limit)


async def _run(
    url: str, api_key: str | None, timeout: float, options: ServeOptions, trace: list[TraceRequest], time_scale: float
) -> tuple[list[Record], str]:
    """Records of one load, and what must be said of its prompts."""
    from lowlat.bench.load.client import Client
    from lowlat.bench.load.prompts import calibrate
    from lowlat.bench.load.serve import plan_lengths, plan_trace, prompts_said, run_serve

    records: list[Record] = []
    total = min(options.requests, len(trace)) if trace else options.requests
    users = f", {options.concurrency} users" if options.concurrency is not None else ""
    async with (
        telling(lambda: f"requests: {len(records)} of {total}{users}"),
        Client(url, api_key=api_key, timeout_s=timeout) as client,
    ):
        scale = await calibrate(client, options.endpoint, options.model, seed=options.seed)
        if trace:
            planned = plan_trace(trace, options, scale, time_scale=time_scale)
        else:
            planned = plan_lengths(options, scale)
        await run_serve(client, options, planned, records)
        return records, scale.remark or prompts_said(planned, records)


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: ModelName = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", help="Closed loop: users, e.g. 1,4,8; default: 1.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, max=1e6, help="Open loop: requests a second, at Poisson times."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="mooncake:FILE or azure:FILE: its lengths and times.")
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option("--time-scale", min=0.001, max=1e6, help="Factor on the trace's times; 2 is half the load."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests of each run.")] = 64,
    input_lengths: Annotated[
        str, typer.Option("--input", "-i", help="Prompt tokens, a number or a distribution.")
    ] = "1024",
    output_lengths: Annotated[str, typer.Option("--output", "-o", help="Answer tokens, likewise.")] = "128",
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, max=1000, help="Requests a user sends before the clock starts.")
    ] = 1,
    goodput: Goodput = None,
    endpoint: Endpoint = "chat",
    arm: ArmName = None,
    workload: Workload = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of lengths, texts and times.")] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Load any OpenAI-compatible server and report TTFT, time between tokens, per-user and total speed, goodput."""
    from lowlat.bench.load.serve import ServeOptions

    with plain_errors():
        random = random_weights(weights, needed=as_json or save)
        targets, path = targets_of(goodput), endpoint_path(endpoint)
        open_loop = rate is not None or (trace is not None and concurrency is None)
        if open_loop and concurrency is not None:
            raise ValueError("choose a closed loop (--concurrency) or an open one (--rate or --trace), not both")
        if rate is not None and trace is not None:
            raise ValueError("a trace brings its own times: use --time-scale instead of --rate")
        if time_scale is not None and (trace is None or not open_loop):
            raise ValueError("--time-scale is for the times of a --trace in an open loop (without --concurrency)")
        _check_lengths(input_lengths, "--input")
        _check_lengths(output_lengths, "--output")
        users = numbers(concurrency or "1", "--concurrency")
        name, arrivals = _read_trace(trace, requests) if trace is not None else ("", [])
        name += f", first {len(arrivals)}" if arrivals else f"{input_lengths} in, {output_lengths} out"
        name = workload or name
        if open_loop:
            name += ", open loop" + (f" at {rate:g}/s" if rate is not None else "")
            name += f", times x{time_scale:g}" if time_scale is not None else ""
        keeper = Keeper(save, results, as_json=as_json, weights_said=weights is not None)
        levels = {0: ""} if open_loop else reachable(users, len(arrivals) or requests, "requests")
        target = ask_target(url, api_key, timeout, model, arm)
        simulated = Simulated(weights=random, acceptance=target.simulated_acceptance)
        subject = result_name("serve", name, target, path, simulated)

        def measure(level: int, remark: str) -> Measured:
            options = ServeOptions(
                model=target.model, endpoint=path, requests=requests, input_lengths=input_lengths,
                output_lengths=output_lengths, concurrency=level or None,
                rate=None if level else (1.0 if rate is None else rate), warmup=warmup, seed=seed * 1009 + level,
            )  # fmt: skip
            scale = 1.0 if time_scale is None else time_scale
            records, guess = asyncio.run(_run(url, api_key, timeout, options, arrivals, scale))
            remarks = [text for text in (remark, guess, load_note()) if text]
            rows = load_rows(
                records, workload=name, arm=target.arm, concurrency=level, targets=targets, remarks=remarks,
                model=target.model,
            )  # fmt: skip
            return Measured(summarize(records, targets), rows, remarks)

        run_levels(levels, measure, Output(subject, simulated, as_json, keeper, weights is not None))
