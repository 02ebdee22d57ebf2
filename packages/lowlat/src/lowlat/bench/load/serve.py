"""Open and closed loops of single requests: `lowlat bench serve`."""

from __future__ import annotations

import asyncio
import math
import random
import time

import msgspec

from lowlat.bench.load.client import Client
from lowlat.bench.load.lengths import parse_lengths
from lowlat.bench.load.prompts import Scale, block_text, body_for, filler
from lowlat.bench.load.records import Record
from lowlat.bench.load.traces import TraceRequest


class Planned(msgspec.Struct, frozen=True):
    """A request to send: its number, prompt text, tokens to generate, and when (seconds from the start; open loop)."""

    number: int
    prompt: str
    prompt_tokens: int
    output_tokens: int
    at: float = 0.0


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. Exactly one of `concurrency` (closed loop) and `rate` (open loop, requests a second) is set.

    A closed loop keeps that many requests in flight; an open loop sends at Poisson times whatever the server does.
    """

    model: str
    endpoint: str = "chat/completions"
    requests: int = 100
    input_lengths: str = "1024"
    output_lengths: str = "128"
    concurrency: int | None = None
    rate: float | None = None
    warmup: int = 1
    """Requests a user sends before the clock starts; they open connections and are not counted."""
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("choose a closed loop (concurrency) or an open one (rate), not both")
        load = self.concurrency if self.concurrency is not None else self.rate
        if self.requests < 1 or self.warmup < 0 or load is None or not 0 < load < math.inf:
            raise ValueError("requests, concurrency and rate must be positive, and warmup not negative")
        if self.endpoint not in ("chat/completions", "completions"):
            raise ValueError(f"endpoint {self.endpoint!r} is neither chat/completions nor completions")


def plan_lengths(options: ServeOptions, scale: Scale) -> list[Planned]:
    """Requests with lengths from distributions, each prompt fresh text of its own; Poisson times for an open loop."""
    draw = random.Random(options.seed)
    inputs, outputs = parse_lengths(options.input_lengths), parse_lengths(options.output_lengths)
    at, planned = 0.0, []
    for number in range(options.requests):
        size, out = inputs(draw), outputs(draw)
        text = filler(f"{options.seed} {number}", scale.words(size))
        planned.append(Planned(number, text, size, out, at))
        if options.rate is not None:
            at += draw.expovariate(options.rate)
    return planned


def plan_trace(trace: list[TraceRequest], options: ServeOptions, scale: Scale, *, time_scale: float) -> list[Planned]:
    """Requests of a trace: its lengths, its shared prefix blocks, its arrival times times `time_scale`."""
    planned = []
    for number, request in enumerate(trace[: options.requests]):
        if request.block_ids:
            block_words = max(1, round(request.block_tokens / scale.tokens_per_word))
            whole = [
                b for i, b in enumerate(request.block_ids) if (i + 1) * request.block_tokens <= request.input_tokens
            ]
            tail = scale.words(request.input_tokens - len(whole) * request.block_tokens)
            salt = f"trace{options.seed}"
            text = block_text(salt, whole, tail, block_words=block_words, tail_seed=number)
        else:
            text = filler(f"{options.seed} {number}", scale.words(request.input_tokens))
        planned.append(
            Planned(number, text, request.input_tokens, max(1, request.output_tokens), request.at * time_scale)
        )
    return planned


PROMPT_TOLERANCE = 0.05


def prompts_said(planned: list[Planned], records: list[Record]) -> str:
    """What must be said where the server counted 5 % more or fewer tokens of the prompts than were wanted (a chat
    template alone is longer than short ones); empty where it did not, or counts none."""
    wanted = {str(request.number): request.prompt_tokens for request in planned}
    pairs = [(wanted[one.name], one.prompt_tokens) for one in records if one.ok and one.prompt_tokens is not None]
    asked, counted = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if abs(counted - asked) <= PROMPT_TOLERANCE * asked:
        return ""
    return f"prompts had {counted / len(pairs):.0f} tokens on average where {asked / len(pairs):.0f} were wanted"


async def _send(client: Client, options: ServeOptions, request: Planned, user: int, due: float | None) -> Record:
    body = body_for(options.endpoint, options.model, request.prompt, request.output_tokens)
    record = await client.stream(options.endpoint, body, name=str(request.number))
    record.user, record.due = user, due
    return record


async def _warm_up(client: Client, options: ServeOptions, users: int) -> None:
    async def one(user: int) -> None:
        for index in range(options.warmup):
            text = filler(f"warm-up {options.seed} {user} {index}", 16)
            record = await client.stream(options.endpoint, body_for(options.endpoint, options.model, text, 4))
            if record.error is not None:
                raise ConnectionError(f"a warm-up request failed: {record.error}")

    await asyncio.gather(*(one(user) for user in range(users)))


async def run_closed(client: Client, options: ServeOptions, planned: list[Planned], records: list[Record]) -> None:
    """Keep `options.concurrency` requests in flight until all are done; each user sends its next one at once."""
    users = options.concurrency or 1
    await _warm_up(client, options, users)
    queue = iter(planned)

    async def user_loop(user: int) -> None:
        for request in queue:
            records.append(await _send(client, options, request, user, None))

    await asyncio.gather(*(user_loop(user) for user in range(users)))


async def run_open(client: Client, options: ServeOptions, planned: list[Planned], records: list[Record]) -> None:
    """Send each request at its time, however many are in flight."""
    await _warm_up(client, options, 1)
    start = time.perf_counter() + 0.05

    async def one(request: Planned) -> None:
        due = start + request.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        records.append(await _send(client, options, request, request.number, due))

    await asyncio.gather(*(one(request) for request in planned))


async def run_serve(
    client: Client, options: ServeOptions, planned: list[Planned], records: list[Record] | None = None
) -> list[Record]:
    """Run the loop that `options` choose. The records come in the order in which requests ended; who passes a list can
    watch it grow.
    """
    done: list[Record] = [] if records is None else records
    loop = run_closed if options.concurrency is not None else run_open
    await loop(client, options, planned, done)
    return done
