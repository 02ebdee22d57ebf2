"""EngineClient against a scripted engine process: streams, aborts, calls, hangs, deaths and the one restart."""

import asyncio
import json
import os
import signal
import time

import pytest
from server_kit import FAKE_PROGRAM, PATIENCE_S, held, standing_still

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.engine.config import EngineConfig
from lowlat.engine.health import EngineState
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from lowlat.engine.request_stream import RequestStream, join_outputs


def request(id, prompt=(1, 2, 3), cache_salt="", **sampling):
    return GenerateRequest(
        id=id,
        prompt_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        arrival=time.monotonic(),
        cache_salt=cache_salt,
    )


def run(test, monkeypatch, script=None, **options):
    monkeypatch.setenv("FAKE_ENGINE", json.dumps(script or {}))
    watchdog_s = options.pop("watchdog_s", PATIENCE_S)
    options = {"heartbeat_timeout": PATIENCE_S} | options

    async def body():
        client = EngineClient(EngineConfig(watchdog_s=watchdog_s), program=FAKE_PROGRAM, **options)
        await client.start()
        try:
            await test(client)
        finally:
            process = client._process
            await client.close()
            assert process is None or process.exit_reason() is not None

    asyncio.run(asyncio.wait_for(body(), 2 * PATIENCE_S))


async def read(stream):
    return [output async for output in stream]


async def until(condition, seconds=PATIENCE_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_outputs_arrive_per_request(monkeypatch):
    async def test(client):
        info = await client.wait_ready(PATIENCE_S)
        assert info.pid == client.pid
        streams = [client.submit(request(f"r{n}", [n, n + 1], max_tokens=5)) for n in range(8)]
        results = await asyncio.gather(*map(read, streams))
        for n, outputs in enumerate(results):
            assert [i for output in outputs for i in output.token_ids] == [n, n + 1, n, n + 1, n]
            assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH
            assert sum(tokens for _, tokens in streams[n].arrivals[f"r{n}"]) == 5
        assert client.open_requests == 0

    run(test, monkeypatch)


def test_one_stream_carries_several_requests_and_ends_once_all_ended(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        outputs = await read(client.submit(request("a", [1], max_tokens=2), request("b", [2], max_tokens=6)))
        for id, tokens in (("a", [1] * 2), ("b", [2] * 6)):
            mine = [output for output in outputs if output.id == id]
            assert [i for output in mine for i in output.token_ids] == tokens
            assert [output.finish_reason for output in mine if output.finish_reason] == [FinishReason.LENGTH]

    run(test, monkeypatch)


def test_what_arrives_meanwhile_is_joined(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        stream = client.submit(request("a", [7], max_tokens=20, logprobs=0))
        await until(lambda: client.open_requests == 0)
        outputs = await read(stream)
        assert len(outputs) == 1
        assert outputs[0].token_ids == [7] * 20
        assert len(outputs[0].logprobs) == 20
        assert len(stream.arrivals["a"]) == 20

    run(test, monkeypatch)


def test_live_ids_are_refused_and_free_again_afterwards(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        stream = client.submit(request("a", max_tokens=50))
        with pytest.raises(ValueError, match="a is in use"):
            client.submit(request("a"))
        await read(stream)
        assert (await read(client.submit(request("a", max_tokens=1))))[-1].finish_reason is FinishReason.LENGTH

    run(test, monkeypatch)


def test_abort_ends_the_stream_at_once_and_frees_the_engine(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        stream = client.submit(request("a", max_tokens=100_000))
        await anext(stream)
        assert client.abort("a")
        assert not client.abort("a")
        assert (await read(stream))[-1].finish_reason is FinishReason.ABORT
        await until(lambda: client.stats.aborted == 1 and client.stats.running == 0)

    run(test, monkeypatch)


def test_calls_answer_or_raise(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        assert await client.call("echo", {"x": 1, "y": "z"}) == {"x": 1, "y": "z"}
        with pytest.raises(RuntimeError, match="no call named nothing"):
            await client.call("nothing")

    run(test, monkeypatch)


def test_death_ends_every_open_request_and_the_engine_is_restarted_once(monkeypatch, tmp_path):
    gate = tmp_path / "may start"
    gate.touch()

    async def test(client):
        first = (await client.wait_ready(PATIENCE_S)).pid
        streams = [client.submit(request(f"r{n}", max_tokens=100_000)) for n in range(4)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        finished = client.stats.step
        gate.unlink()
        os.kill(first, signal.SIGKILL)
        for outputs in await asyncio.gather(*map(read, streams)):
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert "SIGKILL" in outputs[-1].error
        assert client.state is EngineState.RESTARTING
        assert client.health().alive
        assert not client.health().ready
        with pytest.raises(EngineUnavailableError, match="restarted"):
            client.submit(request("early"))
        gate.touch()
        second = (await client.wait_ready(PATIENCE_S)).pid
        assert second != first
        assert client.restarts == 1
        # The same id as one that died: nothing of the first process can reach it.
        assert [i for o in await read(client.submit(request("r0", [9], max_tokens=3))) for i in o.token_ids] == [9] * 3
        await until(lambda: client.stats.step >= finished + 3)

        os.kill(second, signal.SIGKILL)
        await until(lambda: client.state is EngineState.FAILED)
        health = client.health()
        assert not health.alive
        assert "had been restarted already" in health.error
        with pytest.raises(EngineUnavailableError, match="had been restarted already"):
            await client.wait_ready(PATIENCE_S)

    run(test, monkeypatch, {"start_gate": str(gate)})


def test_an_engine_is_ready_once_commands_reach_it(monkeypatch, tmp_path):
    """Events and commands have sockets of their own, and under load the word may come before the second is joined."""
    gate = tmp_path / "may listen"

    async def test(client):
        await until(lambda: client.stats.pages_total == 100)  # said after the word that it is ready
        assert client.state is EngineState.STARTING
        with pytest.raises(EngineUnavailableError, match="loading"):
            client.submit(request("early"))
        gate.touch()
        await client.wait_ready(PATIENCE_S)
        assert [i for o in await read(client.submit(request("a", [9], max_tokens=3))) for i in o.token_ids] == [9] * 3

    run(test, monkeypatch, {"deaf_gate": str(gate)})


def test_a_death_that_was_not_noticed_yet_loses_nothing(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        await anext(client.submit(request("open", max_tokens=100_000)))
        os.kill(client.pid, signal.SIGKILL)
        while client._process.takes_commands:
            time.sleep(0.001)  # not `await`: nobody may look after the engine meanwhile
        assert client.state is EngineState.READY
        with pytest.raises(EngineUnavailableError, match="just ended"):
            client.submit(request("a"), request("b"))
        with pytest.raises(EngineUnavailableError, match="just ended"):
            await client.call("echo")
        assert client.open_requests == 1
        assert client.abort("open")
        await until(lambda: client.restarts == 1)
        await client.wait_ready(PATIENCE_S)
        assert (await read(client.submit(request("a", max_tokens=1))))[-1].finish_reason is FinishReason.LENGTH

    run(test, monkeypatch)


def test_a_restart_is_allowed_again_after_the_window(monkeypatch):
    async def test(client):
        for restarts in (1, 2):
            os.kill((await client.wait_ready(PATIENCE_S)).pid, signal.SIGKILL)
            await until(lambda restarts=restarts: client.restarts == restarts)
        await client.wait_ready(PATIENCE_S)

    run(test, monkeypatch, restart_window_s=0.0)


def test_open_calls_end_with_the_process(monkeypatch):
    async def test(client):
        pid = (await client.wait_ready(PATIENCE_S)).pid
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(client.call("echo"))
        await asyncio.sleep(0)  # its first turn sends the call
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await call

    run(test, monkeypatch)


def test_silence_is_unhealthy_then_killed_and_restarted(monkeypatch, clock):
    async def test(client):
        pid = (await client.wait_ready(PATIENCE_S)).pid
        assert client.health().alive
        stream = client.submit(request("a", max_tokens=100_000))
        await anext(stream)
        os.kill(pid, signal.SIGSTOP)
        # Again and again, since words that were said before may still be unread.
        await until(lambda: clock.skip(20) or not client.health().alive)
        assert "no word from the engine" in client.health().error
        assert client.state is EngineState.READY
        clock.skip(5000)
        outputs = await read(stream)
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "silent for 5000 s" in outputs[-1].error
        assert (await client.wait_ready(PATIENCE_S)).pid != pid

    run(test, monkeypatch, heartbeat_timeout=500, watchdog_s=5000)


def test_silence_that_ends_is_healthy_again(monkeypatch, clock):
    async def test(client):
        pid = (await client.wait_ready(PATIENCE_S)).pid
        with standing_still(pid):
            await until(lambda: clock.skip(20) or not client.health().alive)
        await until(lambda: client.health().ready)
        assert client.pid == pid

    run(test, monkeypatch, heartbeat_timeout=500, watchdog_s=1e9)


def test_a_stuck_step_is_ended_although_heartbeats_go_on(monkeypatch, clock):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        reading = asyncio.create_task(read(client.submit(request("a", max_tokens=100_000))))
        while not reading.done():
            clock.skip(3000)
            await until(lambda: reading.done() or (client.health().heartbeat_age_s or 0) < 1000)
            await asyncio.sleep(0.3)  # a look at the engine right after a leap of the clock counts for nothing
        outputs = await reading
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "finished no step" in outputs[-1].error
        assert sum(len(output.token_ids) for output in outputs) == 5

    run(test, monkeypatch, {"stuck_after_steps": 5}, watchdog_s=5000)


def test_slow_steps_with_progress_stay_healthy(monkeypatch, clock):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        stream = client.submit(request("a", max_tokens=4, **held(1)))
        await anext(stream)
        for _ in range(4):
            clock.skip(3000)
            assert client.health().ready
            await until(lambda: client.health().progress_age_s < 1000)
            await asyncio.sleep(0.3)
        await client.call("release")
        assert (await read(stream))[-1].finish_reason is FinishReason.LENGTH

    run(test, monkeypatch, {"step_s": 0.01}, watchdog_s=5000, heartbeat_timeout=5000)


def test_a_failed_start_says_why_and_is_not_repeated(monkeypatch):
    async def test(client):
        with pytest.raises(EngineUnavailableError, match="no such model"):
            await client.wait_ready(PATIENCE_S)
        assert client.state is EngineState.FAILED
        assert client.restarts == 0
        assert not client.health().alive

    run(test, monkeypatch, {"fail_start": "no such model"})


def test_progress_is_reported_while_starting(monkeypatch, tmp_path):
    seen = []
    gate = tmp_path / "may start"

    async def test(client):
        with pytest.raises(EngineUnavailableError, match="loading"):
            await client.wait_ready(0.05)
        assert client.health().alive
        assert not client.health().ready
        gate.touch()
        await client.wait_ready(PATIENCE_S)
        assert [(event.what, event.done, event.total) for event in seen] == [("weights", 50, 100)]

    run(test, monkeypatch, {"start_gate": str(gate)}, on_progress=seen.append)


def test_messages_of_another_version_end_the_engine(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        outputs = await read(client.submit(request("a", max_tokens=100_000)))
        assert "a message that the front cannot read" in outputs[-1].error
        await until(lambda: client.restarts == 1)

    run(test, monkeypatch, {"garbage_after_steps": 3})


def test_close_ends_open_requests(monkeypatch):
    async def test(client):
        await client.wait_ready(PATIENCE_S)
        stream = client.submit(request("a", max_tokens=100_000))
        await anext(stream)
        await client.close()
        assert (await read(stream))[-1].error == "the server is shutting down"

    run(test, monkeypatch)


def test_joined_outputs_say_the_same():
    first = RequestOutput("a", [1], queue_s=0.5, cached_tokens=4)
    second = RequestOutput("a", [2, 3], finish_reason=FinishReason.STOP, stop_token_id=3)
    joined = join_outputs(first, second)
    assert joined == RequestOutput(
        "a", [1, 2, 3], finish_reason=FinishReason.STOP, stop_token_id=3, queue_s=0.5, cached_tokens=4
    )


def test_outputs_after_the_last_are_dropped():
    async def test():
        stream = RequestStream(["a"])
        stream.put(RequestOutput("a", [1], finish_reason=FinishReason.STOP), 0.0)
        stream.put(RequestOutput("a", [2]), 0.0)
        return await read(stream)

    assert [output.token_ids for output in asyncio.run(test())] == [[1]]
