"""Faults of scheduling, cache and lengths, through HTTP and the engine's own loop, over a device that checks."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from faults_kit import at_rest, simulated_server, solo, wait_for
from kv_simulator import drain, make_core, make_request, solo_answer
from server_kit import PATIENCE_S, Clock, stands_still

CONTEXT = 128


@pytest.fixture(scope="module", params=[1, 4], ids=["plain", "guesses"])
def live(request):
    """Small chunks and a pool that is too small for all that runs at once; with and without speculative steps."""
    shape = {"max_context": CONTEXT, "chunk_tokens": 8, "pages": 90, "step_s": 0.001, "width": request.param}
    with simulated_server(shape) as server:
        yield server


def ids_of(live, prompt, max_tokens, **fields):
    answer = live.complete(prompt=prompt, max_tokens=max_tokens, return_token_ids=True, **fields)
    return answer["choices"][0]["token_ids"], answer


def test_a36_lengths_at_the_edge_of_the_context(live):
    """Clamped, never an error: prompt + answer fit the context; a prompt that leaves no room is a 400."""
    for length, max_tokens in itertools.product(range(CONTEXT - 2, CONTEXT + 2), (None, 1, 2, 100)):
        prompt = [70 + n % 40 for n in range(length)]
        body = {"prompt": prompt, "ignore_eos": True, "return_token_ids": True}
        answer = live.post("/v1/completions", **body, max_tokens=max_tokens)
        room = CONTEXT - length
        if room < 1:
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            continue
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == solo(prompt, min(room, max_tokens or 16), ignore_eos=True)
    # A chat without max_tokens gets what the context leaves.
    assert live.chat("hi", ignore_eos=True)["usage"]["total_tokens"] == CONTEXT
    assert at_rest(live)


def test_a41_salts_share_no_cache_entries(live):
    prompt = [71 + n for n in range(40)]
    expected = solo(prompt, 6, ignore_eos=True)
    seen = []
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}, {"cache_salt": ""}):
        ids, answer = ids_of(live, prompt, 6, ignore_eos=True, **fields)
        assert ids == expected
        seen.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # No salt and the empty salt are the same.
    assert seen == [0, 0, 0, 36, 36, 36]


def test_a44_cancels_and_retries_over_a_shared_prefix_leave_others_alone(live):
    shared = [70 + n % 90 for n in range(64)]

    def run(prompt, request_id=None):
        body = {"prompt": prompt, "max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
            answer = http.post("/v1/completions", json=body | {"request_id": request_id}).json()
        return answer["choices"][0]["finish_reason"], answer["choices"][0]["token_ids"]

    def caught(name, future):
        return name in live.state.live or future.done()

    aborted, turns = 0, 0
    while turns < 4 or aborted < 3:  # a busy machine may answer before the cancel comes
        assert turns < 100
        turn, turns = turns % 4, turns + 1
        # The shared part differs from turn to turn, so that cancels hit prefills too.
        prompts = [[60 + turns, *shared, 200 + n] for n in range(8)]
        with ThreadPoolExecutor(12) as pool:
            running = [pool.submit(run, prompt, f"r{n}") for n, prompt in enumerate(prompts)]
            retries = []
            for n in (0, 1):
                wait_for(functools.partial(caught, f"r{n}", running[n]))
                time.sleep(0.003 * turn)
                live.http.delete(f"/v1/requests/r{n}")
                retries.append(pool.submit(run, prompts[n]))
            others = [[100 + turn, 5, 6, n] for n in range(2)]
            unrelated = [pool.submit(run, prompt) for prompt in others]
            wanted = [*prompts, *prompts[:2], *others]
            for prompt, future in zip(wanted, [*running, *retries, *unrelated], strict=True):
                reason, ids = future.result()
                expected = solo(prompt, 24, ignore_eos=True)
                assert ids == expected[: len(ids)]
                assert reason == "abort" or ids == expected
                aborted += reason == "abort"
    assert at_rest(live)


@pytest.mark.parametrize("width", [1, 3])
def test_a44_a_cancel_at_every_moment_of_a_shared_prefill_leaves_others_alone(width):
    """Cancelled after k turns, retried at once, beside others with the same prefix: no half prompt is ever found."""
    shared = [7 + n % 40 for n in range(40)]
    for moment in range(1, 16):
        core, device = make_core(pages=80, chunk_tokens=8, max_context=80, width=width)
        prompts = [[*shared, n] for n in range(3)]
        for n, prompt in enumerate(prompts):
            core.submit(make_request(f"r{n}", prompt, 6, ignore_eos=True))
        early = [output for _ in range(moment) for output in core.turn()]
        core.abort("r0")
        core.submit(make_request("retry", prompts[0], 6, ignore_eos=True))
        core.submit(make_request("other", [90, 91], 6, ignore_eos=True))
        answers = drain(core, device)
        for name, prompt in (("retry", prompts[0]), ("other", [90, 91]), ("r1", prompts[1]), ("r2", prompts[2])):
            before = [token for output in early if output.id == name for token in output.token_ids]
            assert before + answers.get(name, []) == solo(prompt, 6, ignore_eos=True)
        assert core.scheduler.cache.pool.held == 0


@pytest.mark.parametrize("width", [1, 3])
def test_a45_priorities_preempt_and_everybody_ends_right(width):
    """Fifteen run at priority 0 in a pool that is too small for them; then several come at priority 10."""
    core, device = make_core(pages=40, page_size=4, max_batch=15, chunk_tokens=16, max_context=64, width=width)
    low = [make_request(f"low{n}", [n, 1, 2, 3], 20 + n, ignore_eos=True) for n in range(15)]
    high = [make_request(f"high{n}", [n, 9, 9], 4 + 5 * n, priority=10, ignore_eos=True) for n in range(5)]
    answers: dict[str, list[int]] = {}
    ended: list[str] = []
    for request in low:
        core.submit(request)
    while core.has_work:
        if core.scheduler.stats.step == 12:
            for request in high:
                if request.id not in answers and request.id not in core.scheduler._live:
                    core.submit(request)
        for output in core.turn():
            answers.setdefault(output.id, []).extend(output.token_ids)
            if output.finish_reason:
                ended.append(output.id)
        core.scheduler.check()
        device.check()
    assert core.scheduler.stats.preemptions >= 3
    for request in low + high:
        assert answers[request.id] == solo_answer(request)
    assert [name for name in ended if name.startswith("high")] == [request.id for request in high]
    waited = [name for name in ended if name.startswith("low")]
    assert ended.index("high4") < ended.index(waited[-3]), "lower priorities were put back for higher ones"


def test_a45_equal_priorities_keep_their_order_when_the_running_set_is_full():
    core, device = make_core(pages=60, max_batch=2)
    for number in range(6):
        core.submit(make_request(f"r{number}", [number, 1], 5, ignore_eos=True))
    core.turn()
    core.submit(make_request("first", [9, 9], 5, priority=1, ignore_eos=True))
    core.submit(make_request("second", [8, 8], 5, priority=1, ignore_eos=True))
    answers = drain(core, device)
    order = list(answers)
    assert order.index("first") < order.index("second") < order.index("r2")
    assert [name for name in order if name.startswith("r")] == [f"r{number}" for number in range(6)]
    assert core.scheduler.stats.preemptions > 0


def test_a57_a_long_prefill_that_moves_stays_healthy(monkeypatch):
    """The watchdog's limit is far below the prefill's time, but above a step's: time passes while the engine stands."""
    clock = Clock()
    monkeypatch.setattr("lowlat.engine.client.time", clock)
    pauses = [10, 20, 30, 40]
    shape = {"max_context": 1024, "pages": 300, "chunk_tokens": 8, "pause_at": pauses, "report_s": 0.0}
    limits = {"watchdog_s": 5000.0, "heartbeat_timeout": 5000.0}
    with simulated_server(shape, **limits) as live, ThreadPoolExecutor(1) as pool:
        engine = live.state.engine
        answer = pool.submit(live.complete, prompt=[70 + n % 50 for n in range(480)], max_tokens=1)
        for _ in pauses:
            wait_for(lambda: stands_still(engine.pid) and engine.health().progress_age_s < 1000)
            clock.skip(3000)
            time.sleep(0.3)  # the watchdog looks
            assert httpx.get(live.url + "/ready").status_code == 200
            os.kill(engine.pid, signal.SIGCONT)
        assert answer.result()["usage"]["completion_tokens"] == 1
        assert engine.restarts == 0


@pytest.mark.parametrize("width", [1, 4])
def test_a58_gauges_and_counters_agree_after_all_clients_left(width):
    """They leave in the middle of their answers, while the engine stands still."""
    shape = {"max_context": CONTEXT, "chunk_tokens": 8, "pages": 90, "width": width, "pause_at": [15]}
    with simulated_server(shape) as live:
        body = {"prompt": "abc", "max_tokens": 100, "stream": True, "ignore_eos": True}
        sockets = [live.send("/v1/completions", **body) for _ in range(40)]
        wait_for(lambda: len(live.state.live) == 40 and stands_still(live.state.engine.pid))
        for one in sockets:
            one.close()
        wait_for(lambda: live.metric("lowlat_request_seconds_count") == 40)
        os.kill(live.state.engine.pid, signal.SIGCONT)
        assert at_rest(live)
        assert live.metric("lowlat_running_sequences") == live.metric("lowlat_waiting_sequences") == 0
        assert live.metric('lowlat_kv_pages{state="held"}') == 0
        assert live.metric('lowlat_sequences_total{finish_reason="abort"}') == 40
        assert live.metric("lowlat_queue_seconds_count") == 40
        # Tokens that the engine made and no answer holds any more are in its own counter alone.
        assert live.metric("lowlat_generated_tokens_total") > 8
        assert live.metric("lowlat_completion_tokens_total") <= live.metric("lowlat_generated_tokens_total")
        assert live.complete(prompt=[70, 71], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a43_an_abort_at_every_moment_frees_once(run_ahead, width):
    """Abort after k turns, admit another request at once, follow up: pages, slots and answers are right for each k."""
    for moment in range(9):
        core, device = make_core(max_batch=2, page_size=1, pages=40, chunk_tokens=4, run_ahead=run_ahead, width=width)
        first = make_request("first", [11, 12, 13, 14, 15, 16], 6, ignore_eos=True)
        core.submit(first)
        core.submit(make_request("beside", [21, 22], 8, ignore_eos=True))
        early = [output for _ in range(moment) for output in core.turn()]
        core.abort("first")
        core.scheduler.check()
        device.check()
        core.submit(make_request("next", [31, 32, 33], 5, ignore_eos=True))
        answers = drain(core, device)
        assert answers["next"] == solo([31, 32, 33], 5, ignore_eos=True)
        beside = [token for output in early if output.id == "beside" for token in output.token_ids]
        assert beside + answers.get("beside", []) == solo([21, 22], 8, ignore_eos=True)
        follow_up = [*first.prompt_ids, *solo_answer(first), 9, 9]
        core.submit(make_request("follow", follow_up, 3, ignore_eos=True))
        assert drain(core, device)["follow"] == solo(follow_up, 3, ignore_eos=True)
        assert core.scheduler.cache.pool.held == 0
        assert sorted(core.scheduler._running.free_slots) == [0, 1]
