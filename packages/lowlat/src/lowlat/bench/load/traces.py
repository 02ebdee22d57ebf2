"""Readers of recorded traffic: single requests (Mooncake, Azure) and agent sessions (full text, AgentX form)."""

from __future__ import annotations

import csv
import datetime
import os
import pathlib
import random
from collections.abc import Iterator

import msgspec


class TraceError(ValueError):
    """A trace file that cannot be read; names the file, the line and the cure."""


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace. `at` is in seconds from the first one; equal block ids mean equal prompt blocks."""

    at: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


class Turn(msgspec.Struct, kw_only=True):
    """One request of an agent. Either `messages` (full text) or `block_ids` (AgentX form) describes the prompt.

    `pause_s` is the recorded wait after the end of what it follows: the turn before it, or the joined sub-agents.
    `spacing_s` is set where only the distance from the start of the turn before it is known.
    """

    output_tokens: int
    pause_s: float = 0.0
    spacing_s: float | None = None
    input_tokens: int | None = None
    messages: list[dict[str, str]] | None = None
    block_ids: tuple[int, ...] = ()
    spawns: list[Agent] = []
    """Sub-agents that start after the turn before this one; the awaited ones end before this turn is sent."""


class Agent(msgspec.Struct, kw_only=True):
    """A run of turns in order. A sub-agent starts `pause_s` after its parent's turn and may not be waited for."""

    id: str
    turns: list[Turn]
    pause_s: float = 0.0
    awaited: bool = True
    block_tokens: int = 64
    late_spawns: list[Agent] = []
    """Sub-agents recorded after the last turn; the run ends when the awaited ones have."""
    skipped_empty: int = 0


def data_folder(argument: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Where traces lie: the argument, or the environment variable LOWLAT_DATA. Raises TraceError where neither does."""
    given = os.fspath(argument) if argument is not None else os.environ.get("LOWLAT_DATA", "")
    if not given:
        raise TraceError("no traces: pass their folder or set LOWLAT_DATA to the folder that holds traces/")
    folder = pathlib.Path(given)
    if not folder.exists():
        raise TraceError(f"{folder} does not exist: pass the traces' folder or set LOWLAT_DATA")
    return folder


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Requests of a Mooncake trace (JSON lines; milliseconds; prefix blocks of 512 tokens)."""
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    found: list[TraceRequest] = []
    start = None
    for number, line in _lines(pathlib.Path(path)):
        try:
            got = decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: no Mooncake request: {error}") from error
        _check_counts(path, number, got.input_length, got.output_length)
        start = got.timestamp if start is None else start
        at = (got.timestamp - start) / 1e3
        found.append(TraceRequest(at, got.input_length, got.output_length, tuple(got.hash_ids), 512))
        if limit is not None and len(found) >= limit:
            break
    return _not_empty(found, path)


def read_azure(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """Requests of an Azure LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens)."""
    found: list[TraceRequest] = []
    start = None
    with open(path, newline="") as file:
        for number, line in enumerate(csv.DictReader(file), 2):
            try:
                # seven digits of fraction; Python reads six
                moment = datetime.datetime.fromisoformat(line["TIMESTAMP"].strip()[:26])
                lengths = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{path}:{number}: no Azure request: {error!r}") from error
            _check_counts(path, number, *lengths)
            start = moment if start is None else start
            found.append(TraceRequest((moment - start).total_seconds(), *lengths))
            if limit is not None and len(found) >= limit:
                break
    return _not_empty(found, path)


def _check_counts(path: object, line: int, prompt: int, answer: int) -> None:
    if prompt < 1 or answer < 0:
        raise TraceError(f"{path}:{line}: a prompt of {prompt} tokens and an answer of {answer} cannot be")


def _not_empty(found: list[TraceRequest], path: object) -> list[TraceRequest]:
    if not found:
        raise TraceError(f"{path} holds no requests")
    return found


class _TextLine(msgspec.Struct):
    timestamp: int
    input: str
    output: str
    session_id: str


class _Conversation(msgspec.Struct):
    user_text: str
    before: list[dict[str, str]]
    """Messages of the request itself; the recorded answer comes after them."""
    answer: str


def _continue(conversation: _Conversation | None, text: str) -> list[dict[str, str]]:
    """Messages of a request whose user-side text is `text`, given the earlier request that it continues."""
    if conversation is None:
        return [{"role": "user", "content": text}]
    added = text[len(conversation.user_text) :].lstrip("\n")
    if not added:
        return conversation.before
    if conversation.answer:
        recorded = {"role": "assistant", "content": conversation.answer}
        return [*conversation.before, recorded, {"role": "user", "content": added}]
    *head, last = conversation.before
    return [*head, {"role": "user", "content": last["content"] + "\n\n" + added}]


def read_text_session(
    path: str | os.PathLike[str], *, chars_per_token: float = 4.0, empty_output_tokens: int = 32
) -> Agent:
    """One recorded agent session with full text (JSON lines: timestamp in us, input, output, session_id).

    `input` holds what the user's side had said so far. A request whose input begins with an earlier one's continues
    that conversation: the recorded answer is put between, so the prompt is what the agent really saw. The format
    records no token counts: an answer counts `chars_per_token` characters a token, an empty one (a tool call whose text
    was not kept) `empty_output_tokens`. Requests without input are left out and counted.
    """
    decode = msgspec.json.Decoder(_TextLine).decode
    lines = []
    for number, line in _lines(pathlib.Path(path)):
        try:
            lines.append(decode(line))
        except (msgspec.DecodeError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: no request of an agent session: {error}") from error
    lines.sort(key=lambda entry: entry.timestamp)
    kept = [entry for entry in lines if entry.input]
    if not kept:
        raise TraceError(f"{path} holds no requests with text")
    seen: list[_Conversation] = []
    turns = []
    for index, entry in enumerate(kept):
        earlier = [c for c in seen if entry.input.startswith(c.user_text)]
        messages = _continue(max(earlier, key=lambda c: len(c.user_text), default=None), entry.input)
        seen.append(_Conversation(entry.input, messages, entry.output))
        tokens = round(len(entry.output) / chars_per_token) if entry.output else empty_output_tokens
        spacing = (entry.timestamp - kept[index - 1].timestamp) / 1e6 if index else 0.0
        turns.append(Turn(output_tokens=max(1, tokens), spacing_s=spacing, messages=messages))
    return Agent(id=kept[0].session_id, turns=turns, skipped_empty=len(lines) - len(kept))


class _AgentxEntry(msgspec.Struct):
    """A request (`n`, `s`) or a sub-agent of the AgentX form; fields of the other kind keep their defaults."""

    t: float
    type: str
    input_tokens: int = msgspec.field(name="in", default=0)
    output_tokens: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str = ""
    duration_ms: float | None = None
    status: str = ""
    requests: list[_AgentxEntry] = []


class _AgentxTrace(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_AgentxEntry]


def _entry_end(entry: _AgentxEntry) -> float:
    if entry.type != "subagent":
        return entry.t + (entry.api_time or 0.0)
    if entry.duration_ms is not None:
        return entry.t + entry.duration_ms / 1e3
    return max((_entry_end(e) for e in entry.requests), default=entry.t)


def _agent(name: str, entries: list[_AgentxEntry], block_tokens: int, starts_at: float, pause_s: float) -> Agent:
    """Turns and sub-agents out of entries in recorded order; times of a sub-agent's entries count from the session."""
    agent = Agent(id=name, turns=[], pause_s=pause_s, block_tokens=block_tokens)
    previous_end = starts_at
    waiting: list[Agent] = []
    joined_end = None
    for entry in sorted(entries, key=lambda e: e.t):
        if entry.type == "subagent":
            child_name = f"{name}/{entry.agent_id or len(waiting)}"
            child = _agent(child_name, entry.requests, block_tokens, entry.t, max(0.0, entry.t - previous_end))
            child.awaited = entry.status != "async_launched"
            if child.turns:
                waiting.append(child)
                if child.awaited:
                    joined_end = max(joined_end or 0.0, _entry_end(entry))
            continue
        recorded = max(0.0, entry.t - max(previous_end, joined_end or 0.0))
        pause = recorded if joined_end is not None or entry.think_time is None else entry.think_time
        turn = Turn(
            output_tokens=max(1, entry.output_tokens),
            pause_s=pause if agent.turns or waiting else 0.0,
            input_tokens=entry.input_tokens,
            block_ids=tuple(entry.hash_ids),
            spawns=waiting,
        )
        agent.turns.append(turn)
        previous_end, waiting, joined_end = _entry_end(entry), [], None
    agent.late_spawns = waiting
    return agent


def read_agentx(path: str | os.PathLike[str]) -> Agent:
    """One run in the AgentX form: `requests` of type `n` or `s`, and `subagent` entries with requests of their own.

    A sub-agent starts at its recorded distance from the end of the parent's turn before it, and is joined before the
    parent's next turn unless its status is `async_launched`. Raises TraceError.
    """
    try:
        trace = msgspec.json.decode(pathlib.Path(path).read_bytes(), type=_AgentxTrace)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{path} is no AgentX trace: {error}") from error
    agent = _agent(trace.id, trace.requests, trace.block_size, 0.0, 0.0)
    if not agent.turns:
        raise TraceError(f"{path} holds no requests")
    return agent


def read_agents(path: str | os.PathLike[str], *, seed: int = 0, limit: int | None = None) -> list[Agent]:
    """All agent runs at `path`: a file, or a folder of `*.jsonl` (full text) and `trace_*.json` (AgentX form).

    Shuffled with `seed`, since neighbours in a folder are of one kind. Raises TraceError where there is none.
    """
    place = pathlib.Path(path)
    if not place.exists():
        raise TraceError(f"{place} does not exist")
    files = [place] if place.is_file() else sorted([*place.rglob("*.jsonl"), *place.rglob("trace_*.json")])
    if not files:
        raise TraceError(f"{place} holds neither *.jsonl sessions nor trace_*.json runs")
    random.Random(seed).shuffle(files)
    return [read_agentx(f) if f.suffix == ".json" else read_text_session(f) for f in files[:limit]]
