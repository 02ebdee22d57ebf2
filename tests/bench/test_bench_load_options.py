"""What a user may ask of a load: refusals before anything is started, honest numbers of users, names, progress."""

import asyncio
import json
import os
import re
import shlex

import pytest
import typer
from command_kit import QUICK, lowlat

from lowlat.bench import progress, results
from lowlat.bench.commands import ab, common, load, replay
from lowlat.bench.commands import serve as serve_command
from lowlat.bench.load.replay import ReplayOutcome, count_turns
from lowlat.bench.load.target import Target
from lowlat.bench.load.traces import Agent, Turn
from lowlat.bench.results import Simulated

pytestmark = pytest.mark.usefixtures("idle_machine")
EPILOGS = {"serve": serve_command.EPILOG, "replay": replay.EPILOG, "ab": ab.EPILOG}


def sessions(folder, count, turns=2):
    for number in range(count):
        lines = [
            json.dumps({"timestamp": at, "input": f"{number} {at}", "output": "word " * 8, "session_id": f"s{number}"})
            for at in range(turns)
        ]
        (folder / f"s{number}.jsonl").write_text("\n".join(lines))
    return folder


ABOVE_ZERO = ("nan", "-1", "0", "inf", "many")
NOT_NEGATIVE = ("nan", "-1", "inf", "many")


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("serve", "--rate", ABOVE_ZERO),
        ("serve", "--time-scale", ABOVE_ZERO),
        ("serve", "--timeout", ABOVE_ZERO),
        ("serve", "--requests", (*ABOVE_ZERO, "1.5")),
        ("serve", "--warmup", (*NOT_NEGATIVE, "1.5")),
        ("replay", "--time-scale", NOT_NEGATIVE),
        ("replay", "--pause-cap", NOT_NEGATIVE),
        ("replay", "--duration", ABOVE_ZERO),
        ("replay", "--timeout", ABOVE_ZERO),
        ("replay", "--runs", ABOVE_ZERO),
        ("replay", "--max-turns", ABOVE_ZERO),
        ("replay", "--max-context", (*ABOVE_ZERO, "1")),
        ("ab", "--time-scale", NOT_NEGATIVE),
        ("ab", "--least-covered", ("nan", "-1", "2")),
        ("ab", "--rounds", ABOVE_ZERO),
    ],
)
def test_numbers_out_of_range_are_refused_by_the_option_s_name(command, option, values, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for value in values:
        text = lowlat(command, option, value, code=2).stderr
        assert f"Invalid value for '{option}" in text, value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "-c", "0"), "--concurrency '0'"),
        (("serve", "-c", "4,-1"), "--concurrency '4,-1'"),
        (("serve", "-c", "nan"), "--concurrency 'nan'"),
        (("serve", "--goodput", "ttft=nan"), "--goodput, target 'ttft=nan'"),
        (("serve", "--goodput", ""), "--goodput, target ''"),
        (("serve", "-i", "0"), "--input: lengths '0'"),
        (("serve", "-o", "uniform:9,5"), "--output: lengths 'uniform:9,5'"),
        (("serve", "-o", "nan"), "--output: cannot read the lengths 'nan'"),
        (("serve", "--endpoint", "chats"), "--endpoint"),
        (("serve", "--time-scale", "2"), "--time-scale is for the times of a --trace"),
        (("serve", "--trace", "azure:/nonexistent"), "/nonexistent"),
        (("serve", "--trace", "csv:x"), "mooncake:FILE or azure:FILE"),
        (("replay", "RUNS", "-c", "0"), "--concurrency '0'"),
        (("replay", "RUNS", "-c", "99999999"), "at most 65536"),
        (("replay", "RUNS", "--start", "nan:nan"), "--start"),
        (("replay", "RUNS", "--start", "0:1"), "--start"),
        (("replay", "RUNS", "--goodput", "itl=0"), "--goodput"),
        (("replay", "RUNS", "--endpoint", "x"), "--endpoint"),
        (("ab", "--kernels", "lowlat-cpu", "--arm", "magic"), "--arm 'magic' is none of"),
    ],
)
def test_words_out_of_range_are_refused_before_the_server_is_asked(arguments, message, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("the server was asked")

    monkeypatch.setattr(serve_command, "ask_target", never)
    monkeypatch.setattr(replay, "ask_target", never)
    monkeypatch.setattr("lowlat.bench.ab.run_ab", never)
    folder = str(sessions(tmp_path, 1))
    got = lowlat(*(folder if word == "RUNS" else word for word in arguments), code=1)
    assert message in got.stderr
    assert "Traceback" not in got.output


def test_a_folder_that_cannot_be_written_is_refused_before_the_server_is_asked(tmp_path):
    (tmp_path / "file").write_text("")
    got = lowlat("serve", "--save", "--weights", "real", "--results", tmp_path / "file" / "x", code=1)
    assert "file/x" in got.stderr


def test_users_are_no_more_than_requests_or_runs(scripted, tmp_path):
    server = scripted(*QUICK)
    common_words = ("--url", server.url, "--weights", "real", "--json")
    served = lowlat("serve", *common_words, "-c", "2,8,16", "-n", 3, "-i", 9, "-o", 5)
    rows = json.loads(served.stdout)["rows"]
    assert {row["concurrency"] for row in rows} == {2, 3}
    said = "8 at a time were asked for, but there are 3 requests"
    assert {row.get("note") for row in rows if row["concurrency"] == 3} == {f"concurrency 3: {said}"}
    assert "16 at a time were asked for" in served.stderr
    played = lowlat("replay", sessions(tmp_path, 2), *common_words, "-c", 8)
    rows = json.loads(played.stdout)["rows"]
    assert {row["concurrency"] for row in rows} == {2}
    assert all("8 at a time were asked for, but there are 2 runs" in row["note"] for row in rows)
    repeated = lowlat("replay", tmp_path, *common_words, "-c", 3, "--duration", 0.3)
    assert {row["concurrency"] for row in json.loads(repeated.stdout)["rows"]} == {3}, "runs repeat, so all are played"


def test_an_open_loop_has_no_number_of_users(scripted):
    server = scripted(*QUICK)
    words = ("serve", "--url", server.url, "--rate", 500, "-n", 3, "-i", 9, "-o", 5)
    rows = json.loads(lowlat(*words, "--weights", "real", "--json").stdout)["rows"]
    assert {row["concurrency"] for row in rows} == {0}
    assert all(0 < row["details"]["in_flight"] <= 3 for row in rows)
    assert {row["workload"] for row in rows} == {"9 in, 5 out, open loop at 500/s"}
    assert "concurrency" not in lowlat(*words).stdout


def test_a_busy_machine_is_said(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    server = scripted(*QUICK)
    for words in (("serve", "-n", 1, "-i", 9, "-o", 5), ("replay", sessions(tmp_path, 1))):
        got = lowlat(*words, "--url", server.url)
        assert "- scripted: concurrency 1: busy machine: load average 99.0 on 2 cores" in got.stdout


def test_turns_left_out_of_a_replay_are_said(scripted, tmp_path):
    server = scripted(*QUICK, "--max-context", 200)
    path = tmp_path / "s.jsonl"
    texts = ["short", "", "short " * 300, "short too"]
    entries = [{"timestamp": i, "input": text, "output": "x" * 20, "session_id": "s"} for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, entries)))
    words = ("replay", path, "--url", server.url)
    said = "concurrency 1: 1 turns beyond the context and 1 requests without text were left out"
    assert f"- scripted: {said}" in lowlat(*words).stdout
    path.write_text(json.dumps(entries[2]))
    assert "no request was sent: 1 turns beyond the context" in lowlat(*words, code=1).stderr


def test_names_tell_workload_server_endpoint_and_simulation_apart():
    real = Simulated(weights=False)

    def name(kind="serve", subject="256 in, 64 out", arm="general", endpoint="chat", simulated=real):
        target = Target("smollm2", arm, None)
        return load.result_name(kind, subject, target, load.endpoint_path(endpoint), simulated)

    assert name() == "serve-256-in-64-out-smollm2"
    forced = Simulated(weights=True, acceptance=True)
    others = [
        name(subject="azure code, first 16, open loop"),
        name(arm="plugin:fast"),
        name(endpoint="completions"),
        name(simulated=Simulated(weights=True)),
        name(simulated=forced),
        name("replay", "agent, 4 runs"),
    ]
    assert others == [
        "serve-azure-code-first-16-open-loop-smollm2",
        "serve-256-in-64-out-smollm2-plugin-fast",
        "serve-256-in-64-out-smollm2-completions",
        "serve-256-in-64-out-smollm2-random",
        "serve-256-in-64-out-smollm2-random-simulated-acceptance",
        "replay-agent-4-runs-smollm2",
    ]
    with pytest.raises(ValueError, match="--workload"):
        name(subject="long " * 60)


def test_results_of_two_loads_of_one_model_stand_side_by_side(scripted, tmp_path):
    server = scripted(*QUICK)
    words = ("--url", server.url, "--weights", "real", "--save", "--results", tmp_path / "results")
    lowlat("serve", *words, "-n", 1, "-i", 9, "-o", 5)
    lowlat("serve", *words, "-n", 1, "-i", 9, "-o", 6)
    lowlat("serve", *words, "-n", 1, "-i", 9, "-o", 6, "--endpoint", "completions")
    runs = sessions(tmp_path, 1)
    lowlat("replay", runs, *words)
    lowlat("replay", runs, *words, "--max-turns", 1, "--time-scale", 0, "--start", "0.1:0.2", "--runs", 1)
    trace = tmp_path / "mooncake_talk.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [0]}) + "\n")
    lowlat("serve", *words, "--trace", f"mooncake:{trace}", "--time-scale", 0.5)
    lowlat("serve", *words, "--trace", f"mooncake:{trace}", "--concurrency", 1, "--workload", "my own")
    place = re.sub(r"[^a-z0-9]+", "-", tmp_path.name.lower())
    names = {result.name for _, result in results.load_all(tmp_path / "results")}
    assert names == {
        "serve-9-in-5-out-scripted-scripted",
        "serve-9-in-6-out-scripted-scripted",
        "serve-9-in-6-out-scripted-scripted-completions",
        f"replay-{place}-scripted-scripted",
        f"replay-{place}-1-runs-1-turns-pauses-x0-entered-at-0-1-0-2-scripted-scripted",
        "serve-mooncake-talk-first-1-open-loop-times-x0-5-scripted-scripted",
        "serve-my-own-scripted-scripted",
    }


def test_an_exit_code_is_no_error_of_its_own(capsys):
    with pytest.raises(typer.Exit), common.plain_errors():
        raise typer.Exit(1)
    assert capsys.readouterr().err == ""


def test_progress_is_told_while_nothing_ends(capsys):
    said = []

    async def wait():
        often = asyncio.Event()

        def describe():
            said.append("asked")
            if len(said) == 3:
                often.set()
            return f"state {len(said)}"

        async with progress.telling(describe, every_s=0.001):
            await often.wait()

    asyncio.run(asyncio.wait_for(wait(), 30))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [f"state {n + 1}" for n in range(len(said))]
    assert len(lines) >= 4, "three while it ran, one at the end"


def test_a_replay_says_how_far_it_is(scripted, tmp_path):
    turns = [Turn(output_tokens=1), Turn(output_tokens=1, spawns=[Agent(id="b", turns=[Turn(output_tokens=1)])])]
    late = [Agent(id="c", turns=[Turn(output_tokens=1)] * 3)]
    agents = [Agent(id="a", turns=turns, late_spawns=late)]
    assert count_turns(agents, None) == 6
    assert count_turns(agents, 2) == 3
    assert count_turns(agents, 1) == 1
    outcome = ReplayOutcome(runs=3, ended=1, waiting=2)
    assert replay.progress(outcome, 6) == "turns: 0 of 6; runs: 1 over, 2 active; 2 requests in flight"
    outcome.waiting = 0
    assert "2 active, all in recorded pauses" in replay.progress(outcome, None)
    server = scripted(*QUICK)
    got = lowlat("replay", sessions(tmp_path, 2), "--url", server.url, "--weights", "real", "--json")
    assert f"reading runs from {tmp_path}" in got.stderr
    assert f"2 runs of 4 turns from {tmp_path}" in got.stderr
    assert "turns: 4 of 4; runs: 2 over" in got.stderr
    assert json.loads(got.stdout)["rows"], "progress does not disturb what machines read"


@pytest.mark.parametrize("command", EPILOGS)
def test_examples_of_the_help_can_be_pasted(command, tmp_path, monkeypatch):
    examples = [line.strip() for line in EPILOGS[command].splitlines() if line.startswith("  ")]
    shown = lowlat(command, "--help").stdout
    for example in examples:
        assert example in shown, "an example stands in one line of a terminal of 80 columns"
        assert example.startswith("lowlat bench ")
    assert "LOWLAT_DATA" in EPILOGS[command]


def test_examples_of_loads_are_understood(tmp_path, monkeypatch):
    traces = tmp_path / "traces"
    for folder in ("agent/miniswe", "agentx"):
        (traces / folder).mkdir(parents=True)
        sessions(traces / folder, 1)
    (traces / "azure_code.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4,1\n")
    monkeypatch.setenv("LOWLAT_DATA", str(tmp_path))
    for command in ("serve", "replay"):
        for line in EPILOGS[command].splitlines():
            if line.startswith("  "):
                words = shlex.split(line.replace("$LOWLAT_DATA", str(tmp_path)), comments=True)[2:]
                got = lowlat(*words, "--url", "http://127.0.0.1:9", code=1)
                assert got.stderr.splitlines()[-1].startswith("error: http://127.0.0.1:9/v1/models does not list")
