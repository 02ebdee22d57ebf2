"""Agent runs replayed against a server: `lowlat bench replay`.

A lane plays one run after another. Inside a run, turns keep their order and their recorded pauses, sub-agents start and
are joined as recorded, and prompts hold the recorded assistant turns: what the server answers is timed and discarded.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Iterable

import msgspec

from lowlat.bench.load.client import Client
from lowlat.bench.load.prompts import Scale, block_text, body_for
from lowlat.bench.load.records import Record
from lowlat.bench.load.traces import Agent, Turn


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to replay. `concurrency` runs are active at a time; pauses are recorded seconds times `time_scale`, and none
    is longer than `pause_cap_s` (after scaling). A lane enters its first run at a random turn between the two fractions
    of `start`, after one request of one token that fills the prefix cache as the skipped turns would have.
    """

    model: str
    endpoint: str = "chat/completions"
    concurrency: int = 1
    time_scale: float = 1.0
    pause_cap_s: float = 300.0
    start: tuple[float, float] = (0.0, 0.0)
    duration_s: float | None = None
    """Lanes begin no turn after this time and take fresh runs until then; None: every run is played once."""
    max_turns: int | None = None
    """Turns of each agent that are played; None: all."""
    max_context: int | None = None
    """Turns that need more tokens (AgentX form) are skipped and counted; so are those the server refuses for length."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not (0 <= self.time_scale < math.inf and 0 <= self.pause_cap_s < math.inf):
            raise ValueError("concurrency must be positive; time scale and pause cap not negative")
        if not 0 <= self.start[0] <= self.start[1] < 1:
            raise ValueError(f"start fractions {self.start} must be ordered and lie in [0, 1)")
        if self.endpoint not in ("chat/completions", "completions"):
            raise ValueError(f"endpoint {self.endpoint!r} is neither chat/completions nor completions")


class ReplayOutcome(msgspec.Struct):
    """Records of the measured turns, and what was left out and why."""

    records: list[Record] = []
    events: list[tuple[float, str, str]] = []
    """(seconds, `begin`, `spawn`, `join` or `end`, agent): the order in which runs and sub-agents moved."""
    warmups: int = 0
    beyond_context: int = 0
    empty: int = 0
    runs: int = 0
    lanes: int = 0
    """Runs that were active at a time: fewer than asked for where there are fewer."""
    ended: int = 0
    """Runs that are over."""
    waiting: int = 0
    """Requests whose answer is being waited for now."""

    def left_out(self) -> str:
        """What was not sent, in words; empty where all was."""
        parts = [f"{self.beyond_context} turns beyond the context"] * bool(self.beyond_context)
        parts += [f"{self.empty} requests without text"] * bool(self.empty)
        return " and ".join(parts) + " were left out" if parts else ""


def count_turns(agents: Iterable[Agent], max_turns: int | None) -> int:
    """Recorded turns that a replay plays once, those of sub-agents included."""
    total = 0
    for agent in agents:
        played = agent.turns[:max_turns]
        spawned = [child for turn in played for child in turn.spawns]
        late = agent.late_spawns if max_turns is None else []
        total += len(played) + count_turns([*spawned, *late], max_turns)
    return total


class Replay:
    """One replay of `agents` against one server; who passes an outcome can watch it grow."""

    def __init__(
        self,
        client: Client,
        options: ReplayOptions,
        agents: list[Agent],
        scale: Scale | None = None,
        outcome: ReplayOutcome | None = None,
    ) -> None:
        self.client = client
        self.options = options
        self.agents = agents
        self.scale = scale or Scale()
        self.outcome = outcome or ReplayOutcome()
        self._next_run = 0
        self._deadline = float("inf")

    async def run(self) -> ReplayOutcome:
        """Prime every lane that enters mid-run, then play; ends when all lanes have."""
        draw = random.Random(self.options.seed)
        lanes: list[tuple[int, Agent, int]] = []
        for lane in range(self.options.concurrency):
            agent = self._take_run()
            if agent is None:
                break
            low, high = self.options.start
            played = len(agent.turns[: self.options.max_turns])
            lanes.append((lane, agent, int(draw.uniform(low, high) * played)))
        self.outcome.lanes = len(lanes)
        await asyncio.gather(*(self._prime(lane, agent, first) for lane, agent, first in lanes if first > 0))
        if self.options.duration_s is not None:
            self._deadline = time.perf_counter() + self.options.duration_s
        await asyncio.gather(*(self._lane(lane, agent, first) for lane, agent, first in lanes))
        return self.outcome

    def _take_run(self) -> Agent | None:
        """The next run; with a duration the runs repeat, each pass under a salt of its own."""
        if self._next_run >= len(self.agents) and self.options.duration_s is None:
            return None
        agent = self.agents[self._next_run % len(self.agents)]
        self._next_run += 1
        return agent

    async def _prime(self, lane: int, agent: Agent, first: int) -> None:
        turn = agent.turns[first - 1]
        if self._too_long(turn, 1):
            return
        body = self._body(agent, turn, self._salt(lane, 0), first - 1, max_tokens=1)
        record = await self._stream(body, "warm-up")
        if record.error is not None and not record.beyond_context:
            raise ConnectionError(f"a warm-up request failed: {record.error}")
        self.outcome.warmups += record.error is None

    async def _lane(self, lane: int, agent: Agent | None, first: int) -> None:
        played = 0
        while agent is not None and time.perf_counter() < self._deadline:
            self.outcome.runs += 1
            self.outcome.empty += agent.skipped_empty
            await self._play(agent, lane, self._salt(lane, played), first)
            self.outcome.ended += 1
            first, played = 0, played + 1
            agent = self._take_run()

    def _salt(self, lane: int, played: int) -> str:
        """First word of every prompt of one lane's run: two lanes, or two passes of a run, share no cached prefix."""
        name = f"{self.options.seed} {lane} {played}"
        return hashlib.blake2s(name.encode(), digest_size=6).hexdigest()

    async def _play(self, agent: Agent, lane: int, salt: str, first: int = 0) -> None:
        """Turns of one agent from `first` on, in order, with its sub-agents."""
        self._note("begin", agent)
        background: list[asyncio.Task[None]] = []
        started = ended = time.perf_counter()
        for index, turn in enumerate(agent.turns[: self.options.max_turns]):
            if index < first:
                continue
            if index > first or turn.spawns:
                await self._sub_agents(turn.spawns, lane, salt, background)
                joined = time.perf_counter() if any(child.awaited for child in turn.spawns) else ended
                await self._pause(turn, started, joined)
            if time.perf_counter() >= self._deadline:
                break
            if self._too_long(turn, turn.output_tokens):
                self.outcome.beyond_context += 1
                continue
            started = time.perf_counter()
            await self._send(agent, turn, lane, salt, index)
            ended = time.perf_counter()
        else:
            if self.options.max_turns is None:
                await self._sub_agents(agent.late_spawns, lane, salt, background)
        await asyncio.gather(*background)
        self._note("end", agent)

    async def _sub_agents(
        self, children: list[Agent], lane: int, salt: str, background: list[asyncio.Task[None]]
    ) -> None:
        """Start sub-agents, each after its own pause; return once those have ended that the parent waits for."""
        waited: list[asyncio.Task[None]] = []
        for child in children:
            task = asyncio.create_task(self._child(child, lane, salt))
            (waited if child.awaited else background).append(task)
        await asyncio.gather(*waited)

    async def _child(self, child: Agent, lane: int, salt: str) -> None:
        await asyncio.sleep(min(child.pause_s * self.options.time_scale, self.options.pause_cap_s))
        self._note("spawn", child)
        await self._play(child, lane, salt)
        self._note("join", child)

    async def _pause(self, turn: Turn, started: float, ended: float) -> None:
        """Wait as recorded: from the end of what came before, or (full text) from the start of the turn before."""
        since, seconds = (ended, turn.pause_s) if turn.spacing_s is None else (started, turn.spacing_s)
        seconds = min(seconds * self.options.time_scale, self.options.pause_cap_s)
        await asyncio.sleep(max(0.0, min(since + seconds, self._deadline) - time.perf_counter()))

    def _too_long(self, turn: Turn, output_tokens: int) -> bool:
        limit = self.options.max_context
        return limit is not None and turn.input_tokens is not None and turn.input_tokens + output_tokens > limit

    def _body(self, agent: Agent, turn: Turn, salt: str, index: int, max_tokens: int) -> dict[str, object]:
        if turn.messages is not None:
            first, *rest = turn.messages
            salted = {"role": first["role"], "content": f"[{salt}]\n{first['content']}"}
            return body_for(self.options.endpoint, self.options.model, [salted, *rest], max_tokens)
        block_words = max(1, round(agent.block_tokens / self.scale.tokens_per_word))
        tail_tokens = (turn.input_tokens or 0) - len(turn.block_ids) * agent.block_tokens
        tail = max(0, round((tail_tokens - self.scale.overhead) / self.scale.tokens_per_word))
        seed = (agent.id, index)
        text = block_text(salt, turn.block_ids, tail, block_words=block_words, tail_seed=seed)
        return body_for(self.options.endpoint, self.options.model, text, max_tokens)

    async def _send(self, agent: Agent, turn: Turn, lane: int, salt: str, index: int) -> None:
        body = self._body(agent, turn, salt, index, turn.output_tokens)
        record = await self._stream(body, f"{agent.id}#{index}")
        record.user = lane
        if record.beyond_context:
            self.outcome.beyond_context += 1
            return
        self.outcome.records.append(record)

    async def _stream(self, body: dict[str, object], name: str) -> Record:
        self.outcome.waiting += 1
        try:
            return await self.client.stream(self.options.endpoint, body, name=name)
        finally:
            self.outcome.waiting -= 1

    def _note(self, what: str, agent: Agent) -> None:
        self.outcome.events.append((time.perf_counter(), what, agent.id))
