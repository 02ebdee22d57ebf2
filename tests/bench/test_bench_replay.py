"""Agent replay: order, pauses, sub-agents, recorded turns, salts, skips; and the readers of recorded traffic."""

import asyncio
import copy
import json
import os
import pathlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.bench.load import replay
from lowlat.bench.load.client import Client
from lowlat.bench.load.records import Record
from lowlat.bench.load.replay import Replay, ReplayOptions
from lowlat.bench.load.traces import (
    Agent,
    TraceError,
    Turn,
    data_folder,
    read_agents,
    read_agentx,
    read_azure,
    read_mooncake,
    read_text_session,
)


def play(url, agents, **fields):
    async def body():
        async with Client(url, timeout_s=120) as client:
            return await Replay(client, ReplayOptions(model="scripted", **fields), agents).run()

    return asyncio.run(body())


def request(t, tokens_in, out, blocks, api=0.0, think=None):
    entry = {"t": t, "type": "s", "model": "m", "in": tokens_in, "out": out, "hash_ids": blocks, "api_time": api}
    return entry if think is None else {**entry, "think_time": think}


def subagent(t, name, requests, status="completed", duration_ms=None):
    return {"t": t, "type": "subagent", "agent_id": name, "status": status, "duration_ms": duration_ms,
            "requests": requests, "models": [], "subagent_type": "Explore"}  # fmt: skip


def write_agentx(path, requests):
    trace = {"id": "run", "models": ["m"], "block_size": 8, "hash_id_scope": "local", "requests": requests}
    path.write_text(json.dumps(trace))
    return path


@pytest.fixture
def nested(tmp_path):
    return write_agentx(
        tmp_path / "trace_1.json",
        [
            request(0, 20, 2, [1, 2], api=1.0),
            subagent(1.0, "a", [request(1.0, 10, 2, [7], api=1.0), request(2.5, 18, 2, [7, 8], api=0.5, think=0.5)]),
            subagent(1.5, "b", [request(1.5, 12, 2, [9], api=0.5)], duration_ms=2000),
            subagent(1.0, "c", [request(1.0, 9, 90, [10], api=9.0)], status="async_launched"),
            request(4.0, 30, 3, [1, 2, 3], api=1.0, think=3.0),
            request(7.0, 41, 2, [1, 2, 3, 4, 5], api=1.0, think=2.0),
        ],
    )


def test_agentx_form_is_read_with_its_sub_agents(nested):
    agent = read_agentx(nested)
    assert [turn.input_tokens for turn in agent.turns] == [20, 30, 41]
    assert [child.id for child in agent.turns[1].spawns] == ["run/a", "run/c", "run/b"]
    a, c, b = agent.turns[1].spawns
    assert (a.awaited, b.awaited, c.awaited) == (True, True, False)
    assert (a.pause_s, b.pause_s) == (0.0, 0.5)
    # b's recorded end (1.5 s + 2 s) is the later of the two joined: the parent went on half a second after it
    assert agent.turns[1].pause_s == pytest.approx(0.5)
    assert agent.turns[2].pause_s == 2.0
    assert a.turns[1].pause_s == 0.5


def test_order_spawn_and_join_are_kept(scripted, nested):
    # The answer of run/c, which is not waited for, begins once run#1 was read, the sixth.
    server = scripted("--ttft-ms", 30, "--itl-ms", 5, "--hold", "90:6")
    outcome = play(server.url, [read_agentx(nested)], time_scale=0.02)
    names = [record.name for record in outcome.records]
    assert sorted(names) == ["run#0", "run#1", "run#2", "run/a#0", "run/a#1", "run/b#0", "run/c#0"]
    by_name = {record.name: record for record in outcome.records}
    assert all(record.ok for record in outcome.records)
    first, second = by_name["run#0"], by_name["run#1"]
    for child in ("run/a#0", "run/b#0", "run/c#0"):
        assert by_name[child].sent >= first.ended
    assert by_name["run/a#0"].sent < by_name["run/b#0"].ended, "sub-agents run side by side"
    assert second.sent >= max(by_name["run/a#1"].ended, by_name["run/b#0"].ended)
    assert second.sent < by_name["run/c#0"].ended, "a launched sub-agent is not waited for"
    assert by_name["run#2"].sent - second.ended >= 2.0 * 0.02
    spawned = [name for _, what, name in outcome.events if what == "spawn"]
    joined = [name for _, what, name in outcome.events if what == "join"]
    assert sorted(spawned) == sorted(joined) == ["run/a", "run/b", "run/c"]
    assert by_name["run#1"].cached_tokens >= 17, "blocks repeat as recorded"


def test_time_scale_and_cap_bound_pauses(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1)
    turns = [Turn(output_tokens=1, input_tokens=8, block_ids=(1,), pause_s=p) for p in (0.0, 100.0)]
    outcome = play(server.url, [Agent(id="x", turns=turns)], time_scale=0.5, pause_cap_s=0.2)
    first, second = outcome.records
    assert 0.2 <= second.sent - first.ended < 50.0, "half of 100 s, without the cap"


def session_file(path, entries):
    lines = [
        json.dumps({"timestamp": at * 1000, "input": text, "output": out, "session_id": "s1"})
        for at, text, out in entries
    ]
    path.write_text("\n".join(lines))
    return path


def test_full_text_sessions_put_recorded_answers_back(tmp_path, scripted):
    path = session_file(
        tmp_path / "s.jsonl",
        [
            (40, "do it\n\nresult one", "second answer"),
            (0, "do it", "first answer"),
            (80, "", "lost"),
            (120, "do it\n\nresult one", "retry"),
            (160, "something else", ""),
            (200, "something else\n\nmore", "x" * 40),
        ],
    )
    agent = read_text_session(path, empty_output_tokens=5)
    assert agent.skipped_empty == 1
    roles = [[message["role"] for message in turn.messages] for turn in agent.turns]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"], ["user"], ["user"]]
    assert agent.turns[1].messages[1]["content"] == "first answer"
    assert agent.turns[1].messages[2]["content"] == "result one"
    assert agent.turns[4].messages[0]["content"] == "something else\n\nmore"
    assert [turn.output_tokens for turn in agent.turns] == [3, 3, 1, 5, 10]
    assert [turn.spacing_s for turn in agent.turns] == pytest.approx([0.0, 0.04, 0.08, 0.04, 0.04])
    server = scripted("--ttft-ms", 1, "--itl-ms", 1)
    outcome = play(server.url, [agent], time_scale=0.1)
    assert len(outcome.records) == 5
    assert outcome.empty == 1
    log = server.log()
    assert [entry["messages"] for entry in log] == roles
    assert all(entry["ignore_eos"] for entry in log)
    assert [entry["tokens"] for entry in log] == [3, 3, 1, 5, 10]


def test_each_user_has_a_salt_of_its_own(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1)
    turns = [Turn(output_tokens=2, input_tokens=40, block_ids=(1, 2, 3, 4), pause_s=0)]
    agents = [Agent(id="same", turns=turns, block_tokens=8) for _ in range(4)]
    outcome = play(server.url, agents, concurrency=2)
    assert [record.user for record in outcome.records].count(0) >= 1
    firsts = {entry["first"].split("]")[0] for entry in server.log()}
    assert len(firsts) == 4
    assert all(record.cached_tokens <= 3 for record in outcome.records)


def test_lanes_enter_mid_run_after_one_priming_request(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1)
    turns = [Turn(output_tokens=4, input_tokens=8 * (i + 1), block_ids=tuple(range(i + 1))) for i in range(10)]
    agents = [Agent(id=f"r{i}", turns=turns, block_tokens=8) for i in range(2)]
    outcome = play(server.url, agents, concurrency=2, start=(0.5, 0.6))
    assert outcome.warmups == 2
    log = server.log()
    assert [entry["tokens"] for entry in log[:2]] == [1, 1]
    assert {record.name for record in outcome.records} >= {"r0#6", "r1#9"}
    assert not any(record.name.endswith("#2") for record in outcome.records)
    first_measured = [r for r in outcome.records if r.name in ("r0#5", "r1#5")]
    assert all(record.cached_tokens > 32 for record in first_measured)


def test_lanes_enter_within_the_turns_that_are_played(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1)
    turns = [Turn(output_tokens=4, input_tokens=8 * (i + 1), block_ids=tuple(range(i + 1))) for i in range(10)]
    agents = [Agent(id=f"r{i}", turns=turns, block_tokens=8) for i in range(2)]
    outcome = play(server.url, agents, concurrency=2, start=(0.5, 0.6), max_turns=4)
    assert {record.name for record in outcome.records} == {"r0#2", "r0#3", "r1#2", "r1#3"}


def test_requests_beyond_the_context_are_skipped_and_counted(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1, "--max-context", 60)
    sizes = (16, 400, 24, 80)
    turns = [Turn(output_tokens=2, input_tokens=n, block_ids=tuple(range(n // 8))) for n in sizes]
    agent = Agent(id="x", turns=turns, block_tokens=8)
    outcome = play(server.url, [agent], max_context=100)
    assert [record.name for record in outcome.records] == ["x#0", "x#2"]
    assert outcome.beyond_context == 2
    assert len(server.log()) == 2, "what the limit excludes is not sent; what the server refuses is counted"


def test_a_duration_ends_the_replay_and_repeats_runs(monkeypatch):
    client = Instant([1])
    monkeypatch.setattr(replay, "time", SimpleNamespace(perf_counter=lambda: client.clock))
    agent = Agent(id="x", turns=[Turn(output_tokens=2, input_tokens=8, block_ids=(1,))])
    outcome = asyncio.run(Replay(client, ReplayOptions(model="scripted", duration_s=9.0), [agent]).run())
    assert outcome.runs == len(outcome.records) == 5, "each takes two seconds of the clock; the last began in time"


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="start fractions"):
        ReplayOptions(model="m", start=(0.9, 0.2))
    with pytest.raises(ValueError, match="concurrency"):
        ReplayOptions(model="m", concurrency=0)


def test_single_request_traces_are_read_and_bad_lines_named(tmp_path):
    lines = [
        {"timestamp": 500 + i * 250, "input_length": 600, "output_length": 5, "hash_ids": [0, i]} for i in range(3)
    ]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    got = read_mooncake(path, limit=2)
    assert [(r.at, r.input_tokens, r.block_ids, r.block_tokens) for r in got] == [
        (0.0, 600, (0, 0), 512),
        (0.25, 600, (0, 1), 512),
    ]
    for line in ('{"timestamp": 1}', '{"x": ' + "[" * 100_000):
        path.write_text(line + "\n")
        with pytest.raises(TraceError, match=r"m\.jsonl:1"):
            read_mooncake(path)
    table = tmp_path / "a.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,31,8\n"
    )
    azure = read_azure(table)
    assert [(r.input_tokens, r.output_tokens) for r in azure] == [(4808, 10), (31, 8)]
    assert azure[1].at == pytest.approx(0.052)
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
    with pytest.raises(TraceError, match=r"a\.csv:2"):
        read_azure(table)
    for prompt, answer in ((-5, 4), (0, 4), (5, -1)):
        table.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,{prompt},{answer}\n")
        path.write_text(json.dumps({"timestamp": 0, "input_length": prompt, "output_length": answer}))
        for read, name in ((read_azure, table), (read_mooncake, path)):
            with pytest.raises(TraceError, match=f"a prompt of {prompt} tokens and an answer of {answer} cannot be"):
                read(name)


def test_missing_traces_say_where_to_put_them(tmp_path, monkeypatch):
    monkeypatch.delenv("LOWLAT_DATA", raising=False)
    with pytest.raises(TraceError, match="LOWLAT_DATA"):
        data_folder()
    with pytest.raises(TraceError, match="does not exist"):
        data_folder(tmp_path / "nothing")
    with pytest.raises(TraceError, match="holds neither"):
        read_agents(tmp_path)
    monkeypatch.setenv("LOWLAT_DATA", str(tmp_path))
    assert data_folder() == tmp_path


@pytest.mark.skipif("LOWLAT_DATA" not in os.environ, reason="set LOWLAT_DATA to the folder that holds traces/")
def test_recorded_traces_are_read_whole():
    traces = pathlib.Path(os.environ["LOWLAT_DATA"]) / "traces"
    assert len(read_mooncake(traces / "mooncake_conversation.jsonl")) == 12031
    assert len(read_azure(traces / "azure_code.csv")) == 8819
    agentx = read_agents(traces / "agentx")
    assert len(agentx) == 10
    assert sum(len(agent.turns) for agent in agentx) == 159
    text = read_agents(traces / "agent")
    assert len(text) == 29
    assert all(turn.messages for agent in text for turn in agent.turns)
    answers = [m for agent in text for turn in agent.turns for m in turn.messages if m["role"] == "assistant"]
    assert len(answers) > 1000, "recorded assistant turns are part of the prompts"


# --- order under any nesting, without a network


class Instant:
    """A client whose answers take a few turns of the event loop; it notes what began and ended when."""

    def __init__(self, delays):
        self.clock = 0
        self.began, self.ended = {}, {}
        self._delays = delays

    async def stream(self, endpoint, body, *, name=""):
        self.began[name] = self.clock = self.clock + 1
        for _ in range(self._delays[len(self.began) % len(self._delays)]):
            await asyncio.sleep(0)
        self.ended[name] = self.clock = self.clock + 1
        return Record(
            name=name, status=200, sent=0.0, content_times=[1.0, 2.0], output_tokens=2, finish_reason="length"
        )


def agents(depth):
    spawns = st.lists(agents(depth - 1), max_size=2) if depth else st.just([])
    turn = st.builds(Turn, output_tokens=st.integers(1, 3), input_tokens=st.just(8), spawns=spawns)
    return st.builds(
        Agent, id=st.just("x"), turns=st.lists(turn, min_size=1, max_size=3), awaited=st.booleans(), late_spawns=spawns
    )


def name_all(agent, path):
    """Give every agent of a tree a name of its own; returns all of them."""
    agent.id = path
    children = [child for turn in agent.turns for child in turn.spawns] + agent.late_spawns
    named = [agent]
    for index, child in enumerate(children):
        named += name_all(child, f"{path}.{index}")
    return named


def last_end(client, agent):
    """When an agent and all that it waits for had ended."""
    ends = [client.ended[f"{agent.id}#{len(agent.turns) - 1}"]]
    return max(ends + [last_end(client, child) for child in agent.late_spawns if child.awaited])


@given(
    st.lists(agents(2), min_size=1, max_size=3), st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_every_turn_once_and_in_order_under_any_nesting(runs, delays, concurrency):
    runs = copy.deepcopy(runs)  # drawn trees may share objects, and names are given in place
    everyone = [agent for index, run in enumerate(runs) for agent in name_all(run, f"r{index}")]
    client = Instant(delays)
    options = ReplayOptions(model="m", concurrency=concurrency, time_scale=0.0)
    outcome = asyncio.run(Replay(client, options, runs).run())
    wanted = sorted(f"{agent.id}#{i}" for agent in everyone for i in range(len(agent.turns)))
    assert sorted(record.name for record in outcome.records) == wanted
    assert outcome.runs == len(runs)
    for agent in everyone:
        for index, turn in enumerate(agent.turns):
            began = client.began[f"{agent.id}#{index}"]
            if index:
                assert began > client.ended[f"{agent.id}#{index - 1}"]
            for child in turn.spawns:
                if index:
                    assert client.began[f"{child.id}#0"] > client.ended[f"{agent.id}#{index - 1}"]
                if child.awaited:
                    assert last_end(client, child) < began
    begun = [name for _, what, name in outcome.events if what == "begin"]
    ended = [name for _, what, name in outcome.events if what == "end"]
    assert sorted(begun) == sorted(ended) == sorted(agent.id for agent in everyone)
