"""`lowlat bench replay`."""

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
from lowlat.bench.load.metrics import load_rows, summarize
from lowlat.bench.progress import say, telling
from lowlat.bench.results import Row, Simulated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowlat.bench.load.metrics import Targets
    from lowlat.bench.load.replay import ReplayOptions, ReplayOutcome
    from lowlat.bench.load.target import Target
    from lowlat.bench.load.traces import Agent

MOST_LANES = 65536

EPILOG = """
Needs recorded runs: *.jsonl sessions with full text, or trace_*.json in the
AgentX form. The examples want the folder that holds traces/ in LOWLAT_DATA
(export LOWLAT_DATA=FOLDER); a PATH of your own needs no such variable.

Examples:

  lowlat bench replay                    # plays $LOWLAT_DATA/traces/agent

  lowlat bench replay $LOWLAT_DATA/traces/agent/miniswe -c 4

  lowlat bench replay $LOWLAT_DATA/traces/agentx -c 1,4 --duration 900

Recorded pauses are kept, up to minutes each: --time-scale shortens them.
Turns keep their order; sub-agents start and are joined as recorded; prompts
hold the recorded answers, and what the server says is timed and thrown away.
Each user has a salt of its own, so users share no cache.

Exit code 1 where a request failed; the others' figures are shown and saved.
"""


async def _run(
    url: str, api_key: str | None, timeout: float, options: ReplayOptions, agents: list[Agent]
) -> tuple[ReplayOutcome, str]:
    """What one replay did, and what must be said of its prompts."""
    from lowlat.bench.load.client import Client
    from lowlat.bench.load.prompts import calibrate
    from lowlat.bench.load.replay import Replay, ReplayOutcome, count_turns

    outcome = ReplayOutcome()
    turns = count_turns(agents, options.max_turns) if options.duration_s is None else None
    async with (
        telling(lambda: progress(outcome, turns)),
        Client(url, api_key=api_key, timeout_s=timeout) as client,
    ):
        scale = await calibrate(client, options.endpoint, options.model, seed=options.seed)
        return await Replay(client, options, agents, scale, outcome).run(), scale.remark


def progress(outcome: ReplayOutcome, turns: int | None) -> str:
    """How far a replay of so many turns is; None: one that ends by time."""
    of = "" if turns is None else f" of {turns}"
    active = outcome.runs - outcome.ended
    pausing = ", all in recorded pauses" if active and not outcome.waiting else ""
    return (
        f"turns: {len(outcome.records)}{of}; runs: {outcome.ended} over, {active} active{pausing}; "
        f"{outcome.waiting} requests in flight"
    )


def replay_rows(
    outcome: ReplayOutcome, *, workload: str, target: Target, targets: Targets | None, remarks: Sequence[str]
) -> list[Row]:
    """Rows of one replay, at the number of runs that were really active at a time."""
    rows = load_rows(
        outcome.records, workload=workload, arm=target.arm, concurrency=outcome.lanes, targets=targets,
        remarks=remarks, model=target.model,
    )  # fmt: skip
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
    if not 0.0 <= window[0] <= window[1] < 1.0:
        raise ValueError(f"--start {text!r}: write LOW:HIGH, fractions of a run from 0 to below 1, such as 0.25:0.75")
    return window


def _agents(path: pathlib.Path | None, seed: int, runs: int | None, max_turns: int | None) -> tuple[str, list[Agent]]:
    """The place's name and the runs there; what is read is said."""
    from lowlat.bench.load.replay import count_turns
    from lowlat.bench.load.traces import data_folder, read_agents

    place = path if path is not None else data_folder() / "traces" / "agent"
    say(f"reading runs from {place}")
    agents = read_agents(place, seed=seed, limit=runs)
    say(f"{len(agents)} runs of {count_turns(agents, max_turns)} turns from {place}")
    return place.resolve().stem, agents


def _load_name(
    place: str, runs: int | None, max_turns: int | None, time_scale: float, start: str, duration: float | None
) -> str:
    """What is replayed, and what makes it another load than the whole as recorded."""
    parts = [place]
    parts += [f"{runs} runs"] * (runs is not None) + [f"{max_turns} turns"] * (max_turns is not None)
    parts += [f"pauses x{time_scale:g}"] * (time_scale != 1.0) + [f"entered at {start}"] * (start != "0:0")
    return ", ".join(parts if duration is None else [*parts, f"{duration:g} s"])


def replay(
    path: Annotated[
        pathlib.Path | None,
        typer.Argument(help="A session or a folder of them; default: traces/agent under the folder LOWLAT_DATA."),
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    model: ModelName = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Runs that are active at a time, e.g. 1,4,8.")
    ] = "1",
    time_scale: Annotated[
        float, typer.Option("--time-scale", min=0, max=1e6, help="Factor on recorded pauses; 0: none.")
    ] = 1.0,
    pause_cap: Annotated[float, typer.Option("--pause-cap", min=0, max=1e6, help="Longest pause in seconds.")] = 300.0,
    duration: Annotated[
        float | None,
        typer.Option("--duration", min=0.001, max=1e6, help="Seconds; runs repeat until then. Default: once."),
    ] = None,
    start: Annotated[
        str, typer.Option("--start", help="LOW:HIGH: enter first runs at a random turn between these fractions.")
    ] = "0:0",
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="At most so many runs of the folder.")] = None,
    max_turns: Annotated[
        int | None, typer.Option("--max-turns", min=1, help="At most so many turns of each agent.")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context", min=2, help="AgentX form: skip longer turns; default, and full text: the server's limit."
        ),
    ] = None,
    goodput: Goodput = None,
    endpoint: Endpoint = "chat",
    arm: ArmName = None,
    workload: Workload = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of order, entry points and texts.")] = 0,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Replay recorded agent runs: order, pauses, sub-agents, recorded answers; report P90 interactivity."""
    from lowlat.bench.load.replay import ReplayOptions

    with plain_errors():
        random = random_weights(weights, needed=as_json or save)
        targets, endpoint_name, window = targets_of(goodput), endpoint_path(endpoint), parse_start(start)
        users = numbers(concurrency, "--concurrency")
        if max(users) > MOST_LANES:
            raise ValueError(f"--concurrency {concurrency!r}: at most {MOST_LANES} runs at a time")
        place, agents = _agents(path, seed, runs, max_turns)
        keeper = Keeper(save, results, as_json=as_json, weights_said=weights is not None)
        levels = reachable(users, len(agents), "runs") if duration is None else dict.fromkeys(users, "")
        target = ask_target(url, api_key, timeout, model, arm)
        simulated = Simulated(weights=random, acceptance=target.simulated_acceptance)
        name = workload or _load_name(place, runs, max_turns, time_scale, start, duration)
        subject = result_name("replay", name, target, endpoint_name, simulated)

        def measure(level: int, remark: str) -> Measured:
            options = ReplayOptions(
                model=target.model, endpoint=endpoint_name, concurrency=level, time_scale=time_scale,
                pause_cap_s=pause_cap, start=window, duration_s=duration, max_turns=max_turns,
                max_context=target.max_context if max_context is None else max_context, seed=seed * 1009 + level,
            )  # fmt: skip
            outcome, guess = asyncio.run(_run(url, api_key, timeout, options, agents))
            left_out = outcome.left_out()
            if not outcome.records:
                reason = left_out or "there was none"
                raise ValueError(f"no request was sent: {reason}; see --max-context, --max-turns, --duration")
            remarks = [text for text in (remark, guess, left_out, load_note()) if text]
            rows = replay_rows(outcome, workload=name, target=target, targets=targets, remarks=remarks)
            return Measured(summarize(outcome.records, targets), rows, remarks)

        run_levels(levels, measure, Output(subject, simulated, as_json, keeper, weights is not None))
