"""Load over HTTP: what a client measures equals what a scripted server did, and every failure is counted by name."""

import asyncio
import random
import statistics

import pytest

from lowlat.bench import results
from lowlat.bench.load.client import Card, Client, read_stream, split_events
from lowlat.bench.load.lengths import parse_lengths
from lowlat.bench.load.metrics import Targets, load_rows, parse_targets, summarize
from lowlat.bench.load.prompts import Scale, block_text, calibrate, filler
from lowlat.bench.load.records import Record
from lowlat.bench.load.serve import Planned, ServeOptions, plan_lengths, plan_trace, prompts_said, run_serve
from lowlat.bench.load.target import find_target
from lowlat.bench.load.traces import TraceRequest


def run(url, options, planned=None, scale=None):
    async def body():
        async with Client(url, timeout_s=120) as client:
            found = scale or await calibrate(client, options.endpoint, options.model)
            return await run_serve(client, options, planned or plan_lengths(options, found)), found

    return asyncio.run(body())


def measured_log(server, skip):
    """Entries of the measured requests: calibration and warm-up came first."""
    return server.log()[skip:]


def test_closed_loop_measures_what_the_server_did(scripted):
    server = scripted("--ttft-ms", 40, "--itl-ms", 8)
    options = ServeOptions(model="scripted", requests=6, input_lengths="50", output_lengths="20", concurrency=2)
    records, scale = run(server.url, options)
    assert scale.tokens_per_word == pytest.approx(1.0)
    assert scale.overhead == pytest.approx(1.0)
    log = measured_log(server, skip=2 + 2)
    assert len(log) == len(records) == 6
    assert all(entry["prompt"] == 50 and entry["tokens"] == 20 and entry["ignore_eos"] for entry in log)
    assert [len(r.content_times) for r in records] == [20] * 6
    assert {r.user for r in records} == {0, 1}
    # Both clocks are the machine's: what causes comes before what it causes.
    prompts = {planned.number: planned.prompt for planned in plan_lengths(options, scale)}
    for record in records:
        (entry,) = [entry for entry in log if entry["first"].removeprefix("<user> ") in prompts[int(record.name)]]
        assert record.sent < entry["read"]
        assert record.ttft_s == pytest.approx(record.content_times[0] - record.sent)
        assert record.gap_s == pytest.approx((record.content_times[-1] - record.content_times[0]) / 19)
        assert all(due < came for due, came in zip(entry["due"], record.content_times, strict=True))
        assert record.content_times == sorted(record.content_times)
        assert record.content_times[-1] <= record.ended


def test_what_is_measured_is_near_what_the_server_did(scripted):
    """On a busy machine not each time: until it was seen once."""
    server = scripted("--ttft-ms", 40, "--itl-ms", 8)
    options = ServeOptions(
        model="scripted", requests=4, input_lengths="50", output_lengths="20", concurrency=2, warmup=0
    )

    def near():
        records, _ = run(server.url, options, scale=Scale())
        log = server.log()[-4:]
        gaps = statistics.median(record.gap_s for record in records)
        first = statistics.median(record.ttft_s for record in records)
        truth = statistics.median((entry["written"][-1] - entry["written"][0]) / 19 for entry in log)
        waited = statistics.median(entry["written"][0] - entry["read"] for entry in log)
        return gaps == pytest.approx(truth, rel=0.5) and first == pytest.approx(waited, rel=0.5)

    assert any(near() for _ in range(50))


def test_prompts_of_another_length_than_wanted_are_said():
    planned = [Planned(number, "", tokens, 4) for number, tokens in enumerate((8, 12))]

    def answered(*prompts):
        times = {"content_times": [1.0], "output_tokens": 4}
        return [Record(name=str(number), prompt_tokens=tokens, **times) for number, tokens in enumerate(prompts)]

    assert prompts_said(planned, answered(31, 33)) == "prompts had 32 tokens on average where 10 were wanted"
    assert prompts_said(planned, answered(31)) == "prompts had 31 tokens on average where 8 were wanted"
    for records in (answered(8, 13), answered(None, 12), answered(None, None), [], [Record(name="0", error="no")]):
        assert prompts_said(planned, records) == ""


def test_open_loop_sends_at_its_times_whatever_the_server_does(scripted):
    server = scripted("--ttft-ms", 1, "--itl-ms", 1, "--hold", "3:9")
    options = ServeOptions(model="scripted", requests=8, input_lengths="5", output_lengths="3", rate=40.0, seed=3)
    planned = plan_lengths(options, Scale())
    assert planned[-1].at < 0.5
    records, _ = run(server.url, options, planned, Scale())
    assert all(r.ok for r in records)
    log = measured_log(server, skip=1)
    assert log[-1]["read"] < log[0]["due"][0], "no answer began before all were read"
    assert summarize(records).send_lag_ms_p99 is not None


def test_several_tokens_a_chunk_count_as_tokens(scripted):
    server = scripted("--ttft-ms", 20, "--itl-ms", 4, "--tokens-per-chunk", 3)
    options = ServeOptions(
        model="scripted", endpoint="completions", requests=2, input_lengths="9", output_lengths="12", concurrency=1
    )
    records, _ = run(server.url, options, scale=Scale())
    assert [len(r.content_times) for r in records] == [4, 4]
    assert [r.output_tokens for r in records] == [12, 12]
    assert [r.first_tokens for r in records] == [3, 3]
    assert records[0].gap_s == pytest.approx((records[0].content_times[-1] - records[0].content_times[0]) / 9)
    assert records[1].cached_tokens == 0


@pytest.mark.parametrize(
    ("times", "sizes", "tokens", "first", "gap"),
    [
        pytest.param([1.0, 1.1, 1.2, 1.3], [4, 4, 4, 4], 4, 1, 0.1, id="a token a chunk"),
        pytest.param([1.0, 1.1, 1.2, 1.3], [40, 1, 1, 1], 4, 1, 0.1, id="a long first word"),
        pytest.param([1.0, 1.0, 1.1, 1.2], [4, 4, 4, 4], 4, 2, 0.1, id="two chunks in one read"),
        pytest.param([1.0, 1.1, 1.2, 1.3], [20, 4, 4, 4], 8, 5, 0.1, id="five tokens in the first chunk"),
        pytest.param([1.0, 1.1, 1.2, 1.3], [4, 20, 4, 4], 8, 1, 0.3 / 7, id="five tokens in a later chunk"),
        pytest.param([1.0, 1.1, 1.2, 1.3], [400, 4, 4, 4], 5, 2, 0.1, id="no more than the others leave"),
        pytest.param([1.0, 1.0], [4, 4], 2, 2, None, id="all at once"),
        pytest.param([1.0], [40], 9, 9, None, id="one chunk"),
    ],
)
def test_speed_is_of_the_tokens_after_the_first_text(times, sizes, tokens, first, gap):
    record = Record(content_times=times, content_sizes=sizes, output_tokens=tokens)
    assert record.first_tokens == first
    assert record.gap_s == (None if gap is None else pytest.approx(gap))


def test_trace_blocks_share_prefixes_on_the_server(scripted):
    server = scripted("--ttft-ms", 5, "--itl-ms", 1)
    trace = [TraceRequest(0.0, 40, 2, (1, 2), 16), TraceRequest(0.1, 60, 2, (1, 2, 3, 9), 16)]
    options = ServeOptions(model="scripted", requests=9, concurrency=1, warmup=0)
    planned = plan_trace(trace, options, Scale(), time_scale=2.0)
    assert [p.at for p in planned] == [0.0, 0.2]
    assert [len(p.prompt.split()) for p in planned] == pytest.approx([41, 61], abs=1)
    records, _ = run(server.url, options, planned, Scale())
    assert records[1].cached_tokens >= 32


def test_failures_are_counted_by_reason_and_never_raise(scripted):
    server = scripted("--ttft-ms", 5, "--itl-ms", 1, "--max-context", 30)
    options = ServeOptions(
        model="scripted", requests=3, input_lengths="40", output_lengths="2", concurrency=1, warmup=0
    )
    records, _ = run(server.url, options, scale=Scale())
    assert all(r.beyond_context for r in records)
    with pytest.raises(ValueError, match="maximum context length"):
        summarize(records)


def test_a_server_that_is_not_there_is_named():
    async def body():
        async with Client("http://127.0.0.1:9/v1", timeout_s=2) as client:
            with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
                await client.models()
            record = await client.stream("completions", {"model": "x", "prompt": "x"})
            assert record.error
            assert not record.ok

    asyncio.run(body())
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Client("localhost:8000")


def test_events_are_found_however_the_bytes_are_cut():
    text = b'data: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n: ping\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'
    for size in (1, 3, 7, len(text)):
        chunks = [(float(i), text[i : i + size]) for i in range(0, len(text), size)]
        events = split_events(chunks)
        assert [data for _, data in events][-1] == b"[DONE]"
        assert len(events) == 3
        times = [at for at, _ in events]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error":{"message":"engine died","code":"engine"}}\n\n', "engine died"),
        (b"data: {oops\n\n", "unreadable"),
        (b'data: {"usage":' + b"[" * 100_000 + b"\n\n", "unreadable"),
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', "without a finish reason"),
        (b"<html>a login page</html>", "without events: b'<html>a login"),
    ],
)
def test_broken_streams_are_errors(data, error):
    record = Record(status=200)
    read_stream(record, [(1.0, data)], 100)
    assert error in record.error
    assert not record.ok


def finished(sent, first, gap, tokens, **fields):
    times = [sent + first + gap * i for i in range(tokens)]
    return Record(
        sent=sent, ended=times[-1], content_times=times, output_tokens=tokens, prompt_tokens=7, status=200, **fields
    )


def test_summary_against_figures_worked_out_by_hand():
    records = [finished(0.0, 0.1, 0.01, 11), finished(0.0, 0.3, 0.02, 11), Record(error="HTTP 500: no", status=500)]
    got = summarize(records, Targets(ttft_ms=200, itl_ms=15))
    assert (got.requests, got.failed, got.input_tokens, got.output_tokens) == (2, 1, 14, 22)
    assert got.ttft_ms.mean == pytest.approx(200)
    assert got.itl_ms.p90 == pytest.approx(19)
    assert got.latency_ms.p50 == pytest.approx(350)
    assert got.interactivity_p90 == pytest.approx(1 / 0.019)
    assert got.e2e_interactivity_p90 == pytest.approx(1 / (0.2 / 11 + 0.9 * (0.5 - 0.2) / 11))
    assert got.tokens_per_s_total == pytest.approx(22 / 0.5)
    assert got.goodput == pytest.approx(1 / 0.5)
    assert got.errors == {"HTTP 500: no": 1}
    assert got.in_flight == pytest.approx((0.2 + 0.5) / 0.5)
    rows = {row.metric: row for row in load_rows(records, workload="w", arm="scripted", concurrency=2)}
    assert rows["interactivity_p90"].median == pytest.approx(got.interactivity_p90)
    assert rows["ttft_ms"].details["p90"] == pytest.approx(got.ttft_ms.p90)
    assert all(row.details["failed"] == 1 for row in rows.values() if row.details)
    assert set(rows) <= results.METRICS


def test_lengths_are_drawn_as_written_and_repeat_with_the_seed():
    for text, low, high in [("64", 64, 64), ("fixed:3", 3, 3), ("uniform:5,9", 5, 9), ("normal:100,10", 50, 150)]:
        draw = parse_lengths(text)
        values = [draw(random.Random(i)) for i in range(200)]
        assert low <= min(values) <= max(values) <= high
        assert values == [parse_lengths(text)(random.Random(i)) for i in range(200)]
    drawn = [parse_lengths("lognormal:800,0.5")(random.Random(i)) for i in range(500)]
    assert 700 < statistics.median(drawn) < 900
    for bad in (
        "",
        "fixed:",
        "uniform:9,5",
        "poisson:3",
        "normal:1",
        "fixed:-3",
        "fixed:0",
        "normal:nan,1",
        "1e12",
        "lognormal:9,99",
    ):
        with pytest.raises(ValueError, match="lengths"):
            parse_lengths(bad)


def test_fillers_repeat_and_differ():
    assert filler("a", 100) == filler("a", 100)
    assert filler("a", 100) != filler("b", 100)
    for count in (0, 1, 7, 8, 9, 64, 65):
        assert len(filler("x", count).split()) == count
    one = block_text("s", [1, 2, 3], 5, block_words=16, tail_seed=1).split()
    two = block_text("s", [1, 2, 4], 5, block_words=16, tail_seed=2).split()
    other = block_text("t", [1, 2, 3], 5, block_words=16, tail_seed=1).split()
    assert one[:33] == two[:33]
    assert one[33:] != two[33:]
    assert one[:1] != other[:1]


@pytest.mark.parametrize(
    ("owner", "kernels", "arm"),
    [
        ("vllm", None, "vllm"),
        ("lowlat", None, "general"),
        ("lowlat", "lowlat-cpu/llama-gguf", "lowlat-cpu"),
        ("lowlat", "my-kernels/fast", "plugin:my-kernels"),
    ],
)
def test_a_server_is_named_by_what_it_says(owner, kernels, arm):
    class Fake:
        async def models(self):
            return [Card("m", owner, 99)]

        async def info(self):
            return {"kernels": kernels} if owner == "lowlat" else {}

    got = asyncio.run(find_target(Fake(), None, None))
    assert (got.model, got.arm, got.max_context) == ("m", arm, 99)
    assert asyncio.run(find_target(Fake(), "m", "sglang")).arm == "sglang"
    with pytest.raises(ValueError, match="no model 'x'"):
        asyncio.run(find_target(Fake(), "x", None))


def test_a_server_that_says_nothing_must_be_named():
    class Fake:
        async def models(self):
            return [Card("m")]

    with pytest.raises(ValueError, match="--arm"):
        asyncio.run(find_target(Fake(), None, None))


def test_bad_options_and_targets_are_named():
    with pytest.raises(ValueError, match="closed loop"):
        ServeOptions(model="m", concurrency=1, rate=2.0)
    with pytest.raises(ValueError, match="positive"):
        ServeOptions(model="m", concurrency=0)
    with pytest.raises(ValueError, match="neither"):
        ServeOptions(model="m", concurrency=1, endpoint="chat")
    assert parse_targets("ttft=200,itl=15") == Targets(ttft_ms=200, itl_ms=15)
    for bad in ("", ",", "ttft", "speed=3", "itl=fast", "ttft=nan", "ttft=0", "itl=-1", "ttft=inf", "ttft=1,ttft=2"):
        with pytest.raises(ValueError, match="target"):
            parse_targets(bad)
