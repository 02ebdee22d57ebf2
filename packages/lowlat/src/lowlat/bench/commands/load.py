"""`lowlat bench serve` and `lowlat bench replay`."""

from __future__ import annotations

import asyncio
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lowlat.bench.commands.common import (
    AsJson,
    Folder,
    Keeper,
    Save,
    Weights,
    counter,
    end_progress,
    finish,
    numbers,
    plain_errors,
    random_weights,
    say,
)
from lowlat.bench.results import ARMS, Row, Simulated, known_arm, new_result, slug

if TYPE_CHECKING:
    from lowlat.bench.load.client import Client
    from lowlat.bench.load.metrics import Summary, Targets
    from lowlat.bench.load.records import Record
    from lowlat.bench.load.replay import ReplayOptions, ReplayOutcome
    from lowlat.bench.load.serve import ServeOptions
    from lowlat.bench.load.traces import Agent, TraceRequest

SERVE_EPILOG = """
Examples:

  lowlat bench serve --concurrency 1,2,4,8 --input 8192 --output 1024 --requests 32

  lowlat bench serve --rate 2 --input lognormal:800,0.6 --output uniform:50,400 --goodput ttft=500,itl=30

  lowlat bench serve --trace mooncake:traces/mooncake_conversation.jsonl --time-scale 4 --requests 200

Closed loop (--concurrency): that many users, each sends its next request at once. Open loop (--rate, or a trace):
requests leave at their times whatever the server does. Lengths: N, fixed:N, uniform:LOW,HIGH, normal:MEAN,SD,
lognormal:MEDIAN,SIGMA.
"""

REPLAY_EPILOG = """
Examples:

  lowlat bench replay traces/agent/miniswe --concurrency 4 --time-scale 0.1

  lowlat bench replay traces/agentx --concurrency 1,4,8 --duration 900 --start 0.25:0.75 --weights random

  LOWLAT_DATA=/data lowlat bench replay              plays /data/traces/agent

Turns keep their order; sub-agents start and are joined as recorded; prompts hold the recorded answers, and what the
server says is timed and thrown away. Each user has a salt of its own, so users share no cache.
"""

Url = Annotated[str, typer.Option("--url", help="The server; any with the OpenAI API.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model name to send; default: the first that is listed.")
]
ArmName = Annotated[
    str | None,
    typer.Option("--arm", help="Name of the server in results, such as lowlat-nvidia; default: by what it says."),
]
Endpoint = Annotated[str, typer.Option("--endpoint", help="chat (chat/completions) or completions.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="LOWLAT_API_KEY", help="Key that the server wants.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds after which a request counts as failed.")]

_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}


class Target(msgspec.Struct, frozen=True):
    """The server as it presents itself."""

    model: str
    arm: str
    max_context: int | None
    simulated_acceptance: bool = False


async def find_target(client: Client, model: str | None, arm: str | None) -> Target:
    """Model name, arm name and context limit. Raises ValueError where they cannot be found out."""
    listed = await client.models()
    chosen: dict[str, Any] = next((card for card in listed if model in (None, card["id"])), {})
    if not chosen:
        raise ValueError(f"the server has no model {model!r}: it lists {', '.join(str(card['id']) for card in listed)}")
    owner = str(chosen.get("owned_by"))
    simulated = False
    if owner == "lowlat":
        info = await client.info()
        simulated = bool(info.get("simulated_acceptance"))
        kernels = str(info.get("kernels") or "").partition("/")[0]
        owner = kernels if kernels in ARMS else f"plugin:{kernels}" if kernels else "general"
    if arm is None and not known_arm(owner):
        names = ", ".join(sorted(ARMS))
        raise ValueError(f"the server calls itself {owner!r}: name it with --arm ({names} or plugin:NAME)")
    limit = chosen.get("max_model_len")
    return Target(str(chosen["id"]), arm or owner, limit if isinstance(limit, int) else None, simulated)


def _endpoint(name: str) -> str:
    if name not in _ENDPOINTS:
        raise ValueError(f"--endpoint {name!r} is neither chat nor completions")
    return _ENDPOINTS[name]


def _describe(summary: Summary) -> str:
    """Lines for people, beside the table of medians."""
    text = (
        f"{summary.requests} requests in {summary.duration_s:.1f} s, {summary.failed} failed; "
        f"{summary.input_tokens} tokens in, {summary.output_tokens} out"
    )
    if summary.cached_tokens is not None:
        text += f", {summary.cached_tokens} from the cache"
    lag = summary.send_lag_ms_p99
    if lag is not None and lag > 5:
        text += f"; this client sent up to {lag:.0f} ms late (P99), so figures are not the server's alone"
    if summary.counted_chunks:
        text += "; the server reports no usage, so tokens are chunks"
    for title, spread in (
        ("time to first token, ms", summary.ttft_ms),
        ("time between tokens, ms", summary.itl_ms),
        ("tokens/s of one user", summary.tokens_per_s_user),
        ("latency, ms", summary.latency_ms),
    ):
        if spread is not None:
            figures = f"mean {spread.mean:.1f}, P50 {spread.p50:.1f}, P90 {spread.p90:.1f}, P99 {spread.p99:.1f}"
            text += f"\n  {title}: {figures}"
    for reason, times in sorted(summary.errors.items(), key=lambda item: -item[1])[:3]:
        text += f"\n  {times} x {reason}"
    return text


def _load_trace(text: str, limit: int) -> list[TraceRequest]:
    from lowlat.bench.load.traces import read_azure, read_mooncake

    kind, _, path = text.partition(":")
    readers = {"mooncake": read_mooncake, "azure": read_azure}
    if kind not in readers or not path:
        raise ValueError(f"--trace {text!r}: write mooncake:FILE or azure:FILE")
    return readers[kind](path, limit)


async def _run_serve(
    url: str, api_key: str | None, timeout: float, options: ServeOptions, trace: str | None, time_scale: float
) -> list[Record]:
    from lowlat.bench.load.client import Client
    from lowlat.bench.load.prompts import calibrate
    from lowlat.bench.load.serve import plan_lengths, plan_trace, run_serve

    async with Client(url, api_key=api_key, timeout_s=timeout) as client:
        scale = await calibrate(client, options.endpoint, options.model, seed=options.seed)
        if trace is None:
            planned = plan_lengths(options, scale)
        else:
            planned = plan_trace(_load_trace(trace, options.requests), options, scale, time_scale=time_scale)
        return await run_serve(client, options, planned, counter("requests"))


async def _target(url: str, api_key: str | None, model: str | None, arm: str | None) -> Target:
    from lowlat.bench.load.client import Client

    async with Client(url, api_key=api_key, timeout_s=30) as client:
        return await find_target(client, model, arm)


def serve(
    url: Url = "http://127.0.0.1:8000",
    model: ModelName = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", help="Closed loop: users, e.g. 1,4,8.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Open loop: requests a second, at Poisson times.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="mooncake:FILE or azure:FILE: its lengths and times.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", help="Factor on the trace's times; 2 is half the load.")
    ] = 1.0,
    requests: Annotated[int, typer.Option("--requests", "-n", help="Requests of each run.")] = 64,
    input_lengths: Annotated[
        str, typer.Option("--input", "-i", help="Prompt tokens, a number or a distribution.")
    ] = "1024",
    output_lengths: Annotated[str, typer.Option("--output", "-o", help="Answer tokens, likewise.")] = "128",
    warmup: Annotated[int, typer.Option("--warmup", help="Requests a user sends before the clock starts.")] = 1,
    goodput: Annotated[
        str | None, typer.Option("--goodput", help="Targets in ms: ttft=500,itl=30,latency=9000.")
    ] = None,
    endpoint: Endpoint = "chat",
    arm: ArmName = None,
    workload: Annotated[str | None, typer.Option("--workload", help="Name of the load in results.")] = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of lengths, texts and times.")] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Load any OpenAI-compatible server and report TTFT, time between tokens, per-user and total speed, goodput."""
    from lowlat.bench.load.metrics import load_rows, parse_targets, summarize
    from lowlat.bench.load.serve import ServeOptions

    with plain_errors():
        simulated = random_weights(weights, needed=as_json or save)
        targets = parse_targets(goodput) if goodput else None
        open_loop = rate is not None or (trace is not None and concurrency is None)
        if open_loop and concurrency is not None:
            raise ValueError("choose a closed loop (--concurrency) or an open one (--rate or --trace), not both")
        if rate is not None and trace is not None:
            raise ValueError("a trace brings its own times: use --time-scale instead of --rate")
        speed = (1.0 if rate is None else rate) if open_loop else None
        target = asyncio.run(_target(url, api_key, model, arm))
        name = workload or (
            trace.replace(":", " ").rpartition("/")[2] if trace else f"{input_lengths} in, {output_lengths} out"
        )
        rows: list[Row] = []
        kept = Keeper(save, results)
        for users in numbers(concurrency or "1", "--concurrency") if not open_loop else (None,):
            options = ServeOptions(
                model=target.model, endpoint=_endpoint(endpoint), requests=requests, input_lengths=input_lengths,
                output_lengths=output_lengths, concurrency=users, rate=speed,
                warmup=warmup, seed=seed * 1009 + (users or 0),
            )  # fmt: skip
            if users is not None:
                say(f"{users} users")
            records = asyncio.run(_run_serve(url, api_key, timeout, options, trace, time_scale))
            end_progress()
            print(_describe(summarize(records, targets)), file=sys.stderr)
            shown = name if users is not None else f"{name}, open loop" + (f" at {rate:g}/s" if rate else "")
            rows += load_rows(records, workload=shown, arm=target.arm, concurrency=users or 1, targets=targets)
            flags = Simulated(weights=simulated, acceptance=target.simulated_acceptance)
            result = new_result(slug("serve", target.model), simulated=flags)
            result.rows = rows
            kept(result)
        finish(result, as_json=as_json, kept=kept, weights_said=weights is not None)


async def _run_replay(
    url: str, api_key: str | None, timeout: float, options: ReplayOptions, agents: list[Agent]
) -> ReplayOutcome:
    from lowlat.bench.load.client import Client
    from lowlat.bench.load.prompts import calibrate
    from lowlat.bench.load.replay import Replay

    async with Client(url, api_key=api_key, timeout_s=timeout) as client:
        scale = await calibrate(client, options.endpoint, options.model, seed=options.seed)
        show = counter("turns")
        most = options.max_turns
        total = sum(len(agent.turns) if most is None else min(len(agent.turns), most) for agent in agents)
        return await Replay(client, options, agents, scale, lambda done: show(done, max(done, total))).run()


def replay_rows(
    outcome: ReplayOutcome, *, workload: str, arm: str, concurrency: int, targets: Targets | None = None
) -> list[Row]:
    """Rows of one replay; what was left out is in their details."""
    from lowlat.bench.load.metrics import load_rows

    rows = load_rows(outcome.records, workload=workload, arm=arm, concurrency=concurrency, targets=targets)
    for row in rows:
        row.details = {
            **row.details,
            "runs": outcome.runs,
            "beyond_context": outcome.beyond_context,
            "empty": outcome.empty,
        }
    return rows


def parse_start(text: str) -> tuple[float, float]:
    """`LOW:HIGH` as two fractions. Raises ValueError."""
    low, _, high = text.partition(":")
    try:
        window = float(low), float(high or low)
    except ValueError:
        window = (-1.0, -1.0)
    if not 0.0 <= window[0] <= window[1] <= 1.0:
        raise ValueError(f"--start {text!r}: write LOW:HIGH, fractions of a run, such as 0.25:0.75")
    return window


def replay(
    path: Annotated[
        pathlib.Path | None,
        typer.Argument(help="A session or a folder of them; default: traces/agent under LOWLAT_DATA."),
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    model: ModelName = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Runs that are active at a time, e.g. 1,4,8.")
    ] = "1",
    time_scale: Annotated[float, typer.Option("--time-scale", min=0, help="Factor on recorded pauses; 0: none.")] = 1.0,
    pause_cap: Annotated[float, typer.Option("--pause-cap", min=0, help="Longest pause in seconds.")] = 300.0,
    duration: Annotated[
        float | None, typer.Option("--duration", help="Seconds; runs repeat until then. Default: once.")
    ] = None,
    start: Annotated[
        str, typer.Option("--start", help="LOW:HIGH: enter first runs at a random turn between these fractions.")
    ] = "0:0",
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="At most so many runs of the folder.")] = None,
    max_turns: Annotated[
        int | None, typer.Option("--max-turns", min=1, help="At most so many turns of each agent.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="Skip turns above it; default: the server's limit.")
    ] = None,
    goodput: Annotated[
        str | None, typer.Option("--goodput", help="Targets in ms: ttft=500,itl=30,latency=9000.")
    ] = None,
    endpoint: Endpoint = "chat",
    arm: ArmName = None,
    workload: Annotated[str | None, typer.Option("--workload", help="Name of the load in results.")] = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of order, entry points and texts.")] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Replay recorded agent runs: order, pauses, sub-agents, recorded answers; report P90 interactivity."""
    from lowlat.bench.load.metrics import parse_targets, summarize
    from lowlat.bench.load.replay import ReplayOptions
    from lowlat.bench.load.traces import data_folder, read_agents

    with plain_errors():
        simulated = random_weights(weights, needed=as_json or save)
        place = path if path is not None else data_folder() / "traces" / "agent"
        window = parse_start(start)
        agents = read_agents(place, seed=seed, limit=runs)
        target = asyncio.run(_target(url, api_key, model, arm))
        rows: list[Row] = []
        kept = Keeper(save, results)
        targets = parse_targets(goodput) if goodput else None
        for users in numbers(concurrency, "--concurrency"):
            options = ReplayOptions(
                model=target.model, endpoint=_endpoint(endpoint), concurrency=users, time_scale=time_scale,
                pause_cap_s=pause_cap, start=window, duration_s=duration, max_turns=max_turns,
                max_context=max_context or target.max_context, seed=seed * 1009 + users,
            )  # fmt: skip
            outcome = asyncio.run(_run_replay(url, api_key, timeout, options, agents))
            end_progress()
            skipped = f"{outcome.beyond_context} beyond the context, {outcome.empty} without text"
            if not outcome.records:
                raise ValueError(
                    f"no request was sent: of {outcome.runs} runs {skipped}; see --max-context, --max-turns"
                )
            print(
                f"{outcome.runs} runs; left out: {skipped}. {_describe(summarize(outcome.records, targets))}",
                file=sys.stderr,
            )
            name = workload or f"replay of {place.name}"
            rows += replay_rows(outcome, workload=name, arm=target.arm, concurrency=users, targets=targets)
            flags = Simulated(weights=simulated, acceptance=target.simulated_acceptance)
            result = new_result(slug("replay", target.model), simulated=flags)
            result.rows = rows
            kept(result)
        finish(result, as_json=as_json, kept=kept, weights_said=weights is not None)
