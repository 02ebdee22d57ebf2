"""The A/B of low-latency mode, against servers whose speeds are known: the ratio comes out, and every way to fool it is
refused."""

import json
import os
import pathlib
import socket
import struct
import subprocess
import sys
import urllib.request

import msgspec
import pytest

from lowlat.bench import ab, plots
from lowlat.bench.commands import ab as command
from lowlat.bench.load.records import Record
from lowlat.bench.load.traces import Agent, Turn
from lowlat.bench.local_server import ServerStartError, local_server, reserved_port
from lowlat.bench.results import Simulated, new_result
from lowlat.bench.results import load as load_result

SCRIPTED = (sys.executable, str(pathlib.Path(__file__).with_name("scripted_server.py")))


def sides(**fields):
    shared = ("--ttft-ms", "10", "--itl-ms", "8")
    on = ("--low-latency", "require", "--kernels", "lowlat-cpu")
    return ab.Sides(shared=shared, on=on, on_arm="lowlat-cpu", command=SCRIPTED, **fields)


def without_noise(outcome):
    """Every token of every record at the time that the scripts promise: what is left of a run on an idle machine."""
    for blocks, gap in ((outcome.off, 0.008), (outcome.on, 0.004)):
        for record in (r for load in blocks.values() for block in load for r in block):
            record.content_times = [record.sent + 0.010 + gap * token for token in range(record.output_tokens)]
    return outcome


def test_the_known_gain_comes_out_with_its_interval(tmp_path):
    loads = ab.long_prompt_loads((1, 2), input_tokens=20, output_tokens=12, requests=1)
    said = []
    outcome = ab.run_ab(sides(), loads, rounds=2, say=said.append)
    order = [text.rpartition(", ")[2] for text in said if "round" in text]
    assert order[:4] == ["general", "lowlat-cpu", "lowlat-cpu", "general"]
    assert outcome.covered.share == 1.0
    rows = ab.ab_rows(without_noise(outcome), sides(), loads)
    speedups = {(row.details["of"], row.concurrency): row for row in rows if row.metric == "speedup"}
    assert set(speedups) == {
        (of, users) for of in ("tokens_per_s_user", "interactivity_p90", "e2e_interactivity_p90") for users in (1, 2)
    }
    for users in (1, 2):
        for of, gain in (("tokens_per_s_user", 2.0), ("interactivity_p90", 2.0), ("e2e_interactivity_p90", 98 / 54)):
            row = speedups[of, users]
            assert (row.low, row.median, row.high) == pytest.approx((gain, gain, gain))
    for metric in ("tokens_per_s_user", "tokens_per_s_total"):
        arms = {(row.arm, row.concurrency) for row in rows if row.metric == metric}
        assert arms == {(arm, users) for arm in ("general", "lowlat-cpu") for users in (1, 2)}
    totals = {(row.arm, row.concurrency): row for row in rows if row.metric == "tokens_per_s_total"}
    assert totals["general", 2].samples == 4, "one of each block"
    assert totals["general", 1].median <= 12 / 0.098, "12 tokens take at least 10 ms and 11 gaps of 8 ms"
    result = new_result("ab-scripted", simulated=Simulated(weights=True), command="x")
    result.rows = rows
    drawn = plots.user_against_total(result, "ab-scripted", tmp_path)
    assert [path.name for path in drawn] == [f"ab-scripted-20-in-12-out-user-against-total.{e}" for e in ("png", "svg")]


def test_both_sides_get_the_same_prompts_and_no_block_repeats_one():
    loads = ab.long_prompt_loads((1, 2), input_tokens=30, output_tokens=2, requests=1)
    asked = []
    for _ in range(2):
        with local_server([], command=SCRIPTED) as server:
            for load in loads:
                for block in (0, 1):
                    records = ab._block(server, load, block).records
                    assert [r.prompt_tokens for r in records] == [30] * load.users
            with urllib.request.urlopen(f"{server.url}/script/log") as response:
                asked.append([entry["first"] for entry in json.load(response) if entry["tokens"] == 2])
    assert sorted(asked[0]) == sorted(asked[1])
    assert len(set(asked[0])) == len(asked[0]) == 2 * (1 + 2)


def test_servers_started_one_at_a_time_and_agent_runs():
    turns = [Turn(output_tokens=6, input_tokens=16 * (i + 1), block_ids=tuple(range(i + 1))) for i in range(3)]
    agents = [Agent(id=f"a{i}", turns=turns, block_tokens=16) for i in range(2)]
    loads = ab.agent_loads(agents, {2: "3 at a time were asked for"}, time_scale=0.0, max_turns=2)
    outcome = ab.run_ab(sides(one_at_a_time=True), loads, rounds=1)
    assert len(outcome.ready_s["general"]) == 2
    assert len(set(outcome.ready_s["lowlat-cpu"])) == 2
    rows = ab.ab_rows(without_noise(outcome), sides(), loads)
    assert {row.arm: row.samples for row in rows if row.metric == "ready_ms"} == {"general": 2, "lowlat-cpu": 2}
    assert next(row for row in rows if row.metric == "speedup").median == pytest.approx(2.0)
    notes = {row.note for row in rows if row.metric == "tokens_per_s_user"}
    assert notes == {"concurrency 2: 3 at a time were asked for"}


def test_servers_started_together_and_both_ended_where_one_does_not_start():
    loads = ab.long_prompt_loads((1,), input_tokens=20, output_tokens=4, requests=1)
    kept = []
    outcome = ab.run_ab(
        sides(together=True), loads, rounds=1, measured=lambda outcome, done: kept.append([load.name for load in done])
    )
    assert kept == [[loads[0].name]] * 4, "told after each block"
    processes = [process for ready in outcome.ready_s.values() for process in ready]
    assert len(set(processes)) == 2
    bad = msgspec.structs.replace(sides(together=True), on=("--low-latency", "x"))
    with pytest.raises(ServerStartError, match="invalid choice"):
        ab.run_ab(bad, loads, rounds=1)
    assert not any(pathlib.Path(f"/proc/{process}").exists() for process in processes)
    running = subprocess.run(["pgrep", "-f", SCRIPTED[1]], capture_output=True, text=True, check=False).stdout.split()
    mine = [pid for pid in running if parent(pid) == os.getpid()]
    assert mine == []


def parent(pid):
    status = pathlib.Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("PPid:")), None)


def test_a_run_without_kernels_is_refused():
    outcome = ab.AbOutcome()
    outcome.covered.general = 100.0
    with pytest.raises(RuntimeError, match="0% of the"):
        ab.check_covered(outcome, 0.5)
    outcome.covered.plugin = 300.0
    ab.check_covered(outcome, 0.5)


ANSWERED = Record(sent=0.0, content_times=[0.1, 0.2, 0.3], ended=0.3, status=200, output_tokens=3)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (ab.Block([ANSWERED, Record(error="HTTP 500: out of pages", status=500)]), "1 of 2 requests failed.*of pages"),
        (ab.Block([ANSWERED, Record(status=200, output_tokens=3)]), "1 of 2 requests failed.*no text came"),
        (ab.Block([], "2 turns beyond the context were left out"), "no request was sent: 2 turns beyond"),
    ],
)
def test_a_failed_request_stops_the_comparison(block, message, monkeypatch):
    async def fails(url, load, model, number):
        return block

    monkeypatch.setattr(ab, "_one_block", fails)
    loads = ab.long_prompt_loads((1,), input_tokens=20, output_tokens=12, requests=1)
    with pytest.raises(RuntimeError, match=message):
        ab.run_ab(sides(), loads, rounds=1)


@pytest.mark.parametrize("same", [True, False])
def test_turns_that_both_servers_leave_out_are_said_and_others_refused(same, monkeypatch):
    texts = ["1 turns beyond the context were left out"] * 20 if same else [f"{i} turns" for i in range(20)]

    async def leaves_out(url, load, model, number):
        return ab.Block([ANSWERED], texts.pop())

    monkeypatch.setattr(ab, "_one_block", leaves_out)
    loads = ab.agent_loads([Agent(id="a", turns=[])], {1: ""}, time_scale=0.0, max_turns=None)
    if not same:
        with pytest.raises(RuntimeError, match="same turns"):
            ab.run_ab(sides(), loads, rounds=1)
        return
    rows = ab.ab_rows(ab.run_ab(sides(), loads, rounds=1), sides(), loads)
    notes = {row.note for row in rows if row.metric == "ttft_ms"}
    assert notes == {"concurrency 1: 1 turns beyond the context were left out"}


def test_sigterm_ends_the_server_too():
    code = (
        "import sys, time\n"
        "from lowlat.bench.local_server import local_server\n"
        f"with local_server([], command={SCRIPTED!r}) as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    outer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(outer.stdout.readline())
    assert pathlib.Path(f"/proc/{server}").exists()
    outer.terminate()
    assert outer.wait(timeout=120) == 143
    outer.stdout.close()
    assert not pathlib.Path(f"/proc/{server}").exists()


IP_LOCAL_PORT_RANGE = 51


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux alone")
def test_the_port_of_a_server_that_starts_is_given_to_nobody_else():
    with reserved_port() as port, socket.create_server(("127.0.0.1", 0)) as other:

        def asks_for_any_port():
            """A socket for which this port is the only one left."""
            asking = socket.socket()
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
            except OSError:
                asking.close()
                pytest.skip("this kernel is older than 6.3")
            return asking

        with asks_for_any_port() as asking, pytest.raises(OSError, match="in use"):
            asking.bind(("127.0.0.1", 0))
        with asks_for_any_port() as asking, pytest.raises(OSError, match="Cannot assign"):
            asking.connect(other.getsockname())
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname()).close()


def test_a_server_that_does_not_start_says_why():
    with (
        pytest.raises(ServerStartError, match="invalid choice"),
        local_server(["--low-latency", "x"], command=SCRIPTED),
    ):
        pass
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(ServerStartError, match="not ready within"), local_server([], command=sleeper, start_s=0.3):
        pass


@pytest.mark.parametrize(
    ("serve_args", "flag", "simulated"),
    [
        ("--threads 1", False, False),
        ("--threads 1", True, True),
        ("--spec ngram --spec-simulate-acceptance 3.5", False, True),
        ("--spec ngram --spec-simulate-acceptance=3.5", False, True),
    ],
)
def test_a_forced_acceptance_is_said_in_the_result(serve_args, flag, simulated, monkeypatch, tmp_path):
    given = {}

    def run(sides, loads, *, rounds, say, measured):
        given["shared"], given["loads"] = sides.shared, loads
        outcome = ab.AbOutcome(covered=ab.Covered(plugin=9.0, general=1.0))
        for number, load in enumerate(loads, 1):
            record = Record(sent=0.0, content_times=[0.1, 0.2, 0.3], ended=0.3, status=200, output_tokens=3)
            outcome.off[load.name] = outcome.on[load.name] = [[record]]
            measured(outcome, loads[:number])
            (path,) = tmp_path.glob("*.json")
            assert len({row.concurrency for row in load_result(path).rows}) == number, "kept after each load"
        return outcome

    monkeypatch.setattr(ab, "run_ab", run)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    command.ab(
        serve_args=serve_args, acceptance=flag, kernels="lowlat-cpu", weights="random", save=True, results=tmp_path
    )
    (path,) = tmp_path.glob("*.json")
    result = load_result(path)
    assert (result.simulated.acceptance, result.simulated.weights) == (simulated, True)
    assert result.incomplete == ""
    notes = {row.note for row in result.rows}
    assert notes == {"busy machine: load average 99.0 on 2 cores"}
    assert given["shared"] == ("--model", "smollm2", *serve_args.split())
    assert [(load.users, load.input_tokens, load.output_tokens) for load in given["loads"]] == [
        (users, 8192, 1024) for users in (1, 2, 4, 8)
    ]
