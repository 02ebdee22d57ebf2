"""What `lowlat bench serve` and `lowlat bench replay` share: options, the server, and how loads become one result."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lowlat.bench.keeper import Keeper, finish
from lowlat.bench.load.metrics import Summary, Targets, caveats, parse_targets
from lowlat.bench.load.target import Target, find_target
from lowlat.bench.progress import end_progress, say
from lowlat.bench.results import Row, Simulated, new_result, slug

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.001, max=1e6, help="Seconds after which a request counts as failed.")
]
Goodput = Annotated[str | None, typer.Option("--goodput", help="Targets in ms: ttft=500,itl=30,latency=9000.")]
Workload = Annotated[str | None, typer.Option("--workload", help="Name of the load in results; default: what it is.")]

_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}
_LONGEST_NAME = 180


def endpoint_path(name: str) -> str:
    """The path of an endpoint's short name. Raises ValueError."""
    if name not in _ENDPOINTS:
        raise ValueError(f"--endpoint {name!r} is neither chat nor completions")
    return _ENDPOINTS[name]


def targets_of(goodput: str | None) -> Targets | None:
    """The targets that --goodput names. Raises ValueError."""
    return parse_targets(goodput) if goodput is not None else None


def ask_target(url: str, api_key: str | None, timeout: float, model: str | None, arm: str | None) -> Target:
    """Who the server says it is. Raises ValueError and ConnectionError."""
    from lowlat.bench.load.client import Client

    async def ask() -> Target:
        async with Client(url, api_key=api_key, timeout_s=min(timeout, 30.0)) as client:
            return await find_target(client, model, arm)

    return asyncio.run(ask())


def result_name(kind: str, load: str, target: Target, endpoint: str, simulated: Simulated) -> str:
    """`KIND-LOAD-MODEL`, and what else tells runs apart that must not stand for each other. Raises ValueError."""
    parts = [kind, load, target.model]
    parts += [target.arm] * (target.arm != "general") + ["completions"] * (endpoint == _ENDPOINTS["completions"])
    parts += ["random"] * simulated.weights + ["simulated-acceptance"] * simulated.acceptance
    name = slug(*parts)
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"the result would be called {name!r}, too long for a file: name the load with --workload")
    return name


def reachable(asked: Sequence[int], there: int, what: str) -> dict[int, str]:
    """Numbers of requests or runs at a time that can be had where `there` are in all, each once; where one is less than
    was asked for, with a remark.
    """
    found: dict[int, str] = {}
    for level in asked:
        remark = f"{level} at a time were asked for, but there are {there} {what}" if level > there else ""
        if remark:
            say(remark)
        found.setdefault(min(level, there), remark)
    return found


class Measured(msgspec.Struct):
    """One load: its figures, its rows, and what must be said beside them."""

    summary: Summary
    rows: list[Row]
    remarks: list[str] = []


def describe(measured: Measured) -> str:
    """Lines for people, beside the table of medians."""
    summary = measured.summary
    text = f"{summary.requests} requests in {summary.duration_s:.1f} s, {summary.failed} failed; "
    tokens_in = "unknown" if summary.input_tokens is None else summary.input_tokens
    text += f"{tokens_in} tokens in, {summary.output_tokens} out, {summary.in_flight:.1f} requests in flight on average"
    if summary.cached_tokens is not None:
        text += f", {summary.cached_tokens} tokens from the cache"
    for title, spread in (
        ("time to first token, ms", summary.ttft_ms),
        ("time between tokens, ms", summary.itl_ms),
        ("tokens/s of one user", summary.tokens_per_s_user),
        ("latency, ms", summary.latency_ms),
    ):
        if spread is not None:
            figures = f"mean {spread.mean:.1f}, P50 {spread.p50:.1f}, P90 {spread.p90:.1f}, P99 {spread.p99:.1f}"
            text += f"\n  {title}: {figures}"
    for remark in [*measured.remarks, *caveats(summary)]:
        text += f"\n  {remark}"
    if len(summary.errors) > 1:
        for reason, times in sorted(summary.errors.items(), key=lambda item: -item[1])[:3]:
            text += f"\n  {times} x {reason}"
    return text


class Output(msgspec.Struct, frozen=True):
    """What is done with the result."""

    name: str
    simulated: Simulated
    as_json: bool
    keeper: Keeper
    weights_said: bool


def run_levels(levels: Mapping[int, str], measure: Callable[[int, str], Measured], output: Output) -> None:
    """Measure each load; keep and show the result.

    Raises RuntimeError, once everything is shown, where a request failed. What a load as a whole raises comes through;
    the keeper shows or writes those before it.
    """
    failed = sent = 0
    with output.keeper as kept:
        result = new_result(output.name, simulated=output.simulated)
        kept.begin(result)
        for level, remark in levels.items():
            try:
                measured = measure(level, remark)
            except (ValueError, OSError) as error:
                if not result.rows:
                    raise
                raise RuntimeError(f"the load at concurrency {level} failed: {error}") from error
            end_progress()
            print(describe(measured), file=sys.stderr)
            failed, sent = failed + measured.summary.failed, sent + measured.summary.failed + measured.summary.requests
            result = msgspec.structs.replace(result, rows=[*result.rows, *measured.rows])
            kept(result)
        finish(result, as_json=output.as_json, kept=kept, weights_said=output.weights_said)
    if failed:
        raise RuntimeError(f"{failed} of {sent} requests failed; the figures are those of the others")
