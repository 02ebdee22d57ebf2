"""Servers that fail, lie or are none: what a load says of them, in the table, in the result and in the exit code."""

import asyncio
import json

import pytest
from command_kit import QUICK, lowlat

from lowlat.bench import readme, report, results
from lowlat.bench.commands import load
from lowlat.bench.keeper import Keeper
from lowlat.bench.load import usage
from lowlat.bench.load.client import Client
from lowlat.bench.load.metrics import load_rows, summarize
from lowlat.bench.load.prompts import Scale, calibrate
from lowlat.bench.load.records import Record

pytestmark = pytest.mark.usefixtures("idle_machine")


def session(path, turns=4):
    lines = [
        json.dumps({"timestamp": at, "input": f"hello {at}", "output": "answer " * 8, "session_id": "s"})
        for at in range(turns)
    ]
    path.write_text("\n".join(lines))
    return path


def test_failed_requests_are_in_the_table_the_report_and_the_exit_code(scripted, tmp_path):
    server = scripted(*QUICK, "--fail-every", 3)
    common = ("serve", "--url", server.url, "-n", 6, "-i", 20, "-o", 8, "--weights", "real")
    got = lowlat(*common, "--save", "--results", tmp_path, code=1)
    said = "concurrency 1: 2 of 6 requests failed and are not in the figures (HTTP 500: out of pages)"
    assert f"- scripted: {said}" in got.stdout
    assert "4 requests in" in got.stderr
    assert got.stderr.rstrip().endswith("error: 2 of 6 requests failed; the figures are those of the others")
    (path,) = tmp_path.glob("*.json")
    result = results.load(path)
    assert {row.note for row in result.rows} == {said}
    assert {row.details["failed"] for row in result.rows} == {2}
    assert said in report.full_report([(path, result)])
    for row in result.rows:
        row.arm, row.note = "general", "busy machine: load average 9.0 on 2 cores"
    assert "| real, 2 requests failed, busy machine |" in readme.performance_block([(path, result)])
    printed = lowlat(*common, "--json", code=1)
    assert json.loads(printed.stdout)["rows"][0]["note"] == said


def test_failed_turns_of_a_replay_are_said_too(scripted, tmp_path):
    server = scripted(*QUICK, "--fail-every", 2)
    got = lowlat("replay", session(tmp_path / "s.jsonl"), "--url", server.url, code=1)
    assert "- scripted: concurrency 1: 2 of 4 requests failed" in got.stdout
    assert "error: 2 of 4 requests failed" in got.stderr


def test_a_load_without_one_answer_is_an_error(scripted):
    server = scripted(*QUICK, "--fail-every", 1)
    got = lowlat("serve", "--url", server.url, "-n", 2, "-i", 20, "-o", 8, code=1)
    assert got.stdout == ""
    assert "error: none of 2 requests succeeded: HTTP 500: out of pages" in got.stderr


def test_a_load_that_fails_loses_no_earlier_one(tmp_path):
    good = Record(sent=0.0, ended=0.3, content_times=[0.1, 0.2, 0.3], output_tokens=3, status=200)

    def measure(level, remark):
        records = [good] if level == 1 else [Record(error="ConnectError: gone")]
        return load.Measured(summarize(records), load_rows(records, workload="w", arm="scripted", concurrency=level))

    output = load.Output("serve-w-m", results.Simulated(weights=False), False, Keeper(True, tmp_path), True)
    said = "the load at concurrency 4 failed: none of 1 requests succeeded: ConnectError: gone"
    with pytest.raises(RuntimeError, match=said):
        load.run_levels({1: "", 4: "", 8: ""}, measure, output)
    (path,) = tmp_path.glob("*.json")
    assert results.load(path).incomplete == said
    assert {row.concurrency for row in results.load(path).rows} == {1}


@pytest.mark.parametrize(
    ("said", "chunks", "asked", "tokens", "reason"),
    [
        ({"completion_tokens": 12}, 4, 12, 12, ""),
        ({"completion_tokens": 4}, 4, None, 4, ""),
        (None, 4, 12, 4, "no usage"),
        ({"prompt_tokens": 3}, 4, 12, 4, "no usage"),
        ({"completion_tokens": -5}, 4, 12, 4, "'-5', is no count"),
        ({"completion_tokens": 12.0}, 4, 12, 4, "'12.0', is no count"),
        ({"completion_tokens": "12"}, 4, 12, 4, "no count"),
        ({"completion_tokens": True}, 1, 12, 1, "no count"),
        ({"completion_tokens": 3}, 4, 12, 4, "says 3 tokens, but 4 chunks came"),
        ({"completion_tokens": 10**18}, 4, 12, 4, "but 12 were asked for"),
        ([12], 4, 12, 4, "no count"),
    ],
)
def test_counts_of_tokens_are_believed_within_what_came_and_what_was_asked(said, chunks, asked, tokens, reason):
    found, why = usage.completion_tokens(said, chunks=chunks, asked=asked)
    assert found == tokens
    assert reason in why
    assert bool(why) == bool(reason)


def test_counts_of_prompts_are_believed_within_their_bytes():
    assert usage.prompt_tokens({"prompt_tokens": 70}, 400) == 70
    for bad in (None, 7, {}, {"prompt_tokens": -1}, {"prompt_tokens": 0}, {"prompt_tokens": 1.5}):
        assert usage.prompt_tokens(bad, 400) is None
    assert usage.prompt_tokens({"prompt_tokens": 400 + usage.TEMPLATE_TOKENS + 1}, 400) is None
    cached = {"prompt_tokens_details": {"cached_tokens": 8}}
    assert usage.cached_tokens(cached, 8) == 8
    assert usage.cached_tokens(cached, 7) is None
    assert usage.cached_tokens({"prompt_tokens_details": {"cached_tokens": -8}}, 7) is None
    assert usage.cached_tokens({"prompt_tokens_details": [8]}, 9) is None


def test_a_server_whose_usage_is_nonsense_is_measured_by_chunks_and_that_is_said(scripted):
    server = scripted(*QUICK, "--usage", json.dumps({"prompt_tokens": -3, "completion_tokens": -8}))
    got = lowlat("serve", "--url", server.url, "-n", 2, "-i", 20, "-o", 8, "--weights", "real", "--json")
    rows = json.loads(got.stdout)["rows"]
    assert {row["output_tokens"] for row in rows} == {16}
    assert {row.get("input_tokens") for row in rows} == {None}
    assert all("tokens of 2 answers are chunks: the server's usage, '-8', is no count" in row["note"] for row in rows)
    assert all("prompts have a token a word, a guess" in row["note"] for row in rows)
    assert "unknown tokens in, 16 out, " in got.stderr
    assert all(row["median"] > 0 for row in rows)


@pytest.mark.parametrize(
    "said", [{"prompt_tokens": 7, "completion_tokens": 1}, {"prompt_tokens": 60000, "completion_tokens": 1}]
)
def test_a_tokenizer_that_cannot_be_is_not_calibrated_to(said, scripted):
    server = scripted(*QUICK, "--usage", json.dumps(said))

    async def ask():
        async with Client(server.url, timeout_s=20) as client:
            return await calibrate(client, "completions", "scripted")

    scale = asyncio.run(ask())
    assert (scale.tokens_per_word, scale.overhead) == (1.0, 0.0)
    assert f"32 words as {said['prompt_tokens']} tokens" in scale.remark
    assert Scale().remark == ""


def test_answers_shorter_than_asked_are_said(scripted):
    server = scripted(*QUICK, "--tokens-per-chunk", 2, "--usage", '{"prompt_tokens": 9, "completion_tokens": 6}')
    got = lowlat("serve", "--url", server.url, "-n", 3, "-i", 20, "-o", 8)
    assert "3 of 3 answers have fewer tokens than were asked for" in got.stdout


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("<html>welcome</html>", 200, "expected JSON as"),
        ("", 200, "expected JSON as"),
        ("[]", 200, "expected JSON as"),
        ('{"x": ' + "[" * 50_000, 200, "expected JSON as"),
        ('{"x": ' + "[" * 50_000, 500, 'HTTP 500: {"x": [['),
        ('{"data": {"id": "m"}}', 200, "expected JSON as"),
        ('{"data": [{"name": "m"}]}', 200, "expected JSON as"),
        ('{"data": [{"id": 7}]}', 200, "expected JSON as"),
        ('{"data": [{"id": ""}]}', 200, "expected JSON as"),
        ('{"data": []}', 200, "lists no model"),
        ('{"error": {"message": "who are you"}}', 401, "HTTP 401: who are you; pass --api-key"),
        ("gone fishing", 503, "HTTP 503: gone fishing"),
        ("", 307, "HTTP 307"),
    ],
)
def test_an_address_that_lists_no_models_is_named_with_what_was_expected(body, status, message, scripted):
    server = scripted("--models", body, "--models-status", status)
    got = lowlat("serve", "--url", server.url, code=1)
    (line,) = got.stderr.splitlines()
    assert line.startswith(f"error: {server.url}/v1/models ")
    assert message in line
    if message.startswith("expected"):
        assert '{"data": [{"id": "NAME", ...}, ...]}' in line


def test_odd_words_beside_a_models_name_do_no_harm(scripted):
    card = {"id": "m", "owned_by": ["x"], "max_model_len": "long"}
    server = scripted(*QUICK, "--models", json.dumps({"data": [card]}))
    got = lowlat("serve", "--url", server.url, "-n", 1, "-i", 9, "-o", 8, code=1)
    assert "the server calls itself \"['x']\": name it with --arm" in got.stderr
    lowlat("serve", "--url", server.url, "-n", 1, "-i", 9, "-o", 8, "--arm", "vllm")
    assert "results know no arm 'magic'" in lowlat("serve", "--url", server.url, "--arm", "magic", code=1).stderr


@pytest.mark.parametrize(
    "url", ["http://", "http://h:99999", "h:80", "ftp://h", "http://h:x", "http://h h", "http://["]
)
def test_an_address_that_is_none_is_refused(url):
    assert "is no URL: write http://HOST:PORT" in lowlat("serve", "--url", url, code=1).stderr


def test_a_key_that_no_header_carries_is_refused():
    assert "API key" in lowlat("serve", "--api-key", "schlüssel", code=1).stderr
