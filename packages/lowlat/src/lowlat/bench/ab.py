"""`lowlat bench ab`: the same server twice, only `--low-latency` differing, loaded in alternation.

This is the experiment that low-latency mode is judged by: what one user's decode speed and P90 interactivity gain.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from lowlat.bench.load.client import Client
from lowlat.bench.load.metrics import gaps, interactivity, load_rows, normalised, summarize
from lowlat.bench.load.prompts import calibrate
from lowlat.bench.load.records import Record
from lowlat.bench.load.replay import Replay, ReplayOptions
from lowlat.bench.load.serve import ServeOptions, plan_lengths, run_serve
from lowlat.bench.load.traces import Agent
from lowlat.bench.local_server import SERVE, LocalServer, local_server, local_servers
from lowlat.bench.results import Row, row_from_interval, row_from_samples
from lowlat.bench.stats import ratio_interval

Say = Callable[[str], None]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What each server gets: single requests of fixed lengths, or agent runs where `agents` is set."""

    name: str
    users: int
    input_tokens: int = 8192
    output_tokens: int = 1024
    requests_per_user: int = 1
    agents: tuple[Agent, ...] = ()
    time_scale: float = 0.0
    max_turns: int | None = None
    seed: int = 0
    remark: str = ""
    """What is said beside its figures."""


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The two servers: what they share and what differs. Names are arms of the result format."""

    shared: tuple[str, ...]
    off: tuple[str, ...] = ("--low-latency", "off")
    on: tuple[str, ...] = ("--low-latency", "auto")
    on_arm: str = "lowlat-nvidia"
    off_arm: str = "general"
    command: tuple[str, ...] = SERVE
    one_at_a_time: bool = False
    """Start a server for each block, for models that fit into memory once only."""
    together: bool = False
    """Start both servers at the same time: sooner ready, but the times to ready are those of two at a time."""


class Covered(msgspec.Struct):
    """Steps of the low-latency server by path, so that a run whose kernels never ran is not taken for a comparison."""

    plugin: float = 0.0
    general: float = 0.0

    @property
    def share(self) -> float:
        """Fraction of steps that kernels computed."""
        return self.plugin / (self.plugin + self.general) if self.plugin + self.general else 0.0


class Block(msgspec.Struct):
    """What one server answered to one load once, and which turns were not sent, in words."""

    records: list[Record]
    left_out: str = ""


class AbOutcome(msgspec.Struct):
    """Records of both arms, by load and round of two blocks each, and what the kernels covered."""

    off: dict[str, list[list[Record]]] = {}
    on: dict[str, list[list[Record]]] = {}
    under_way: dict[bool, list[Record]] = {}
    """Of the last load, what the round that has not ended yet brought so far, without and with kernels."""
    covered: Covered = msgspec.field(default_factory=Covered)
    totals: dict[tuple[str, str], list[float]] = {}
    """By load and arm: tokens a second of all users together, in each block."""
    left_out: dict[str, str] = {}
    """By load: turns that no block sent, in words; empty where all were sent."""
    ready_s: dict[str, dict[int, float]] = {}
    """By arm, and process of the server: seconds to its first ready answer."""


async def _one_block(url: str, load: Load, model: str, block: int) -> Block:
    """One load against one server. Both sides of half a round get the same texts, and no other block gets them."""
    seed = (load.seed * 1009 + load.users) * 1009 + block
    async with Client(url, timeout_s=1800) as client:
        scale = await calibrate(client, "chat/completions", model, seed=load.seed)
        if load.agents:
            options = ReplayOptions(
                model=model, concurrency=load.users, time_scale=load.time_scale, max_turns=load.max_turns,
                seed=seed,
            )  # fmt: skip
            outcome = await Replay(client, options, list(load.agents), scale).run()
            return Block(outcome.records, outcome.left_out())
        serve = ServeOptions(
            model=model, requests=load.users * load.requests_per_user, input_lengths=str(load.input_tokens),
            output_lengths=str(load.output_tokens), concurrency=load.users, seed=seed,
        )  # fmt: skip
        return Block(await run_serve(client, serve, plan_lengths(serve, scale)))


async def _model_name(url: str) -> str:
    async with Client(url, timeout_s=60) as client:
        return (await client.models())[0].id


def _block(server: LocalServer, load: Load, block: int) -> Block:
    model = asyncio.run(_model_name(server.url))
    found = asyncio.run(_one_block(server.url, load, model, block))
    bad = [record.error or "no text came" for record in found.records if not record.ok]
    if bad:
        what = f"{len(bad)} of {len(found.records)} requests failed"
        raise RuntimeError(f"{load.name}: {what}, so there is no comparison: {bad[0]}")
    if not found.records:
        raise RuntimeError(f"{load.name}: no request was sent: {found.left_out or 'there was none'}")
    return found


@contextlib.contextmanager
def _servers(sides: Sides) -> Iterator[Callable[[bool], contextlib.AbstractContextManager[LocalServer]]]:
    """A function that lends the server of one side: both run throughout, or each is started when it is lent."""

    def arguments(on: bool) -> list[str]:
        return [*sides.shared, *(sides.on if on else sides.off)]

    if sides.one_at_a_time:
        yield lambda on: local_server(arguments(on), command=sides.command)
        return
    with contextlib.ExitStack() as stack:
        if sides.together:
            off, on_server = stack.enter_context(
                local_servers([arguments(False), arguments(True)], command=sides.command)
            )
        else:
            off, on_server = (
                stack.enter_context(local_server(arguments(on), command=sides.command)) for on in (False, True)
            )
        yield lambda on: contextlib.nullcontext(on_server if on else off)


def run_ab(
    sides: Sides,
    loads: Sequence[Load],
    *,
    rounds: int,
    say: Say = lambda _: None,
    measured: Callable[[AbOutcome, Sequence[Load]], None] = lambda outcome, loads: None,
) -> AbOutcome:
    """Load both servers in the order off, on, on, off in every round; one warm-up block on each first.

    `measured` is told the outcome so far, and its loads, after each block. Raises RuntimeError where a request fails or
    a server does not start.
    """
    outcome = AbOutcome()
    with _servers(sides) as lend:
        for number, load in enumerate(loads, 1):
            outcome.off[load.name], outcome.on[load.name] = [], []
            if not sides.one_at_a_time:
                for on in (False, True):
                    with lend(on) as server:
                        say(f"{load.name}: warm-up of {sides.on_arm if on else sides.off_arm}")
                        _block(server, msgspec.structs.replace(load, output_tokens=8, max_turns=1), -1)
            for index in range(rounds):
                outcome.under_way = {False: [], True: []}
                for half, on in enumerate((False, True, True, False)):
                    say(f"{load.name}: round {index + 1} of {rounds}, {sides.on_arm if on else sides.off_arm}")
                    with lend(on) as server:
                        # off and on of one half get the same prompts; each server sees either text once
                        _measure(outcome, sides, server, load, on, 2 * index + half // 2)
                    if half == 3:
                        outcome.off[load.name].append(outcome.under_way.pop(False))
                        outcome.on[load.name].append(outcome.under_way.pop(True))
                    measured(outcome, loads[:number])
    return outcome


def _measure(outcome: AbOutcome, sides: Sides, server: LocalServer, load: Load, on: bool, block: int) -> None:
    """One block into the outcome."""
    arm = sides.on_arm if on else sides.off_arm
    before = server.low_latency_steps() if on else {}
    found = _block(server, load, block)
    if outcome.left_out.setdefault(load.name, found.left_out) != found.left_out:
        raise RuntimeError(f"{load.name}: the servers did not leave out the same turns, so there is no comparison")
    outcome.under_way[on] += found.records
    outcome.totals.setdefault((load.name, arm), []).append(summarize(found.records).tokens_per_s_total)
    if on:
        after = server.low_latency_steps()
        outcome.covered.plugin += after.get("plugin", 0.0) - before.get("plugin", 0.0)
        outcome.covered.general += after.get("general", 0.0) - before.get("general", 0.0)
    outcome.ready_s.setdefault(arm, {})[server.process.pid] = server.ready_s


def ab_rows(outcome: AbOutcome, sides: Sides, loads: Sequence[Load], note: str = "") -> list[Row]:
    """Rows of both arms, and for each load the speedups with intervals: decode speed, P90 interactivity, end to end.

    The speedups are of whole rounds alone. `note` is said of every arm's figures and of the speedups.
    """
    started = "from the process to its first ready answer, polled every 100 ms"
    if sides.together:
        started += "; both servers at the same time"
    rows = [
        row_from_samples(
            [round(1e3 * seconds, 1) for seconds in ready.values()], workload="start of the server", arm=arm,
            metric="ready_ms", note=started,
        )
        for arm, ready in outcome.ready_s.items()
    ]  # fmt: skip
    share = round(outcome.covered.share, 4)
    for load in loads:
        off, on = outcome.off[load.name], outcome.on[load.name]
        begun = outcome.under_way if load is loads[-1] else {}
        for arm, blocks in ((sides.off_arm, [*off, begun.get(False, [])]), (sides.on_arm, [*on, begun.get(True, [])])):
            everything = [record for block in blocks for record in block]
            if not everything:
                continue
            remarks = [text for text in (load.remark, outcome.left_out.get(load.name)) if text]
            rows += [
                msgspec.structs.replace(row, note="; ".join(filter(None, (note, row.note))))
                for row in load_rows(everything, workload=load.name, arm=arm, concurrency=load.users, remarks=remarks)
                # over blocks with pauses between them these mean nothing
                if row.metric not in ("tokens_per_s_total", "goodput")
            ]
            totals = outcome.totals.get((load.name, arm))
            if totals:
                rows.append(
                    row_from_samples(
                        totals, workload=load.name, arm=arm, metric="tokens_per_s_total", concurrency=load.users,
                        note=note,
                    )
                )  # fmt: skip
        if not off:
            continue
        # speeds are inverse times, so the speedup is the time of off over the time of on
        ratios = {
            "tokens_per_s_user": ratio_interval(
                [gaps(block) for block in off], [gaps(block) for block in on], statistic=statistics.median
            ),
            "interactivity_p90": ratio_interval(
                [gaps(block) for block in on], [gaps(block) for block in off], statistic=interactivity
            ),
            "e2e_interactivity_p90": ratio_interval(
                [normalised(block) for block in on], [normalised(block) for block in off], statistic=interactivity
            ),
        }
        for of, interval in ratios.items():
            row = row_from_interval(
                interval, workload=f"{load.name}: {of}", arm=sides.on_arm, metric="speedup", concurrency=load.users,
                note=note,
            )  # fmt: skip
            row.details = {"of": of, "over": sides.off_arm, "covered_share": share}
            rows.append(row)
    return rows


def agent_loads(
    agents: Sequence[Agent], users: Mapping[int, str], *, time_scale: float, max_turns: int | None
) -> list[Load]:
    """The preset `agent`: for each number of users, that many runs at a time; with what is said beside each."""
    return [
        Load(
            name=f"agent, {n} runs",
            users=n,
            agents=tuple(agents[: max(users)]),
            time_scale=time_scale,
            max_turns=max_turns,
            remark=remark,
        )
        for n, remark in users.items()
    ]


def long_prompt_loads(users: Sequence[int], *, input_tokens: int, output_tokens: int, requests: int) -> list[Load]:
    """The preset `8k1k`: for each number of users, `requests` requests a user of those lengths."""
    return [
        Load(
            name=f"{input_tokens} in, {output_tokens} out, {n} users", users=n, input_tokens=input_tokens,
            output_tokens=output_tokens, requests_per_user=requests,
        )
        for n in users
    ]  # fmt: skip


def check_covered(outcome: AbOutcome, least: float) -> None:
    """Raise RuntimeError where kernels computed less than `least` of the low-latency server's steps."""
    if outcome.covered.share < least:
        raise RuntimeError(
            f"kernels computed {outcome.covered.share:.0%} of the low-latency server's steps, less than {least:.0%}: "
            "nothing was compared. `lowlat plugins check` says what refuses"
        )


def data_agents(path: pathlib.Path, seed: int, limit: int) -> list[Agent]:
    """Agent runs for the preset `agent`."""
    from lowlat.bench.load.traces import read_agents

    return read_agents(path, seed=seed, limit=limit)
