"""An engine process without a model: it speaks the engine's messages and says what a script tells it.

The script is JSON in the environment variable FAKE_ENGINE (see `Script`). A request is answered with the script's
`reply` and an end of sequence, or, without one, with its own prompt again and again. A request may bring a script of
its own, as JSON in its cache salt: its reply, burst, place to stand still and number of cached tokens then count for it
alone; without a reply, the engine's `answers` do.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from lowlat.engine import messages as m
from lowlat.engine.config import EngineConfig
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from lowlat.engine.stats import EngineStats


class Script(msgspec.Struct, kw_only=True):
    step_s: float = 0.001
    burst: int = 1
    """Tokens a step brings for each request."""
    reply: list[int] | None = None
    answers: list[tuple[str, str]] = []
    """(words, text): a request whose prompt holds these words is answered with the text; the last words count."""
    eos_id: int = 256
    vocab_size: int = 260
    max_context: int = 128
    item_tokens: int = 100
    start_gate: str | None = None
    """A path: the engine is ready once a file is there."""
    hold_after: int | None = None
    """A request stands still after so many tokens: an abort ends it, or the call `release` lets all go on."""
    deaf_gate: str | None = None
    """A path: the engine says that it is ready, yet joins its commands only once a file is there."""
    fail_start: str | None = None
    cached_tokens: int = 0
    stuck_after_steps: int | None = None
    """Heartbeats go on, but no step finishes any more."""
    garbage_after_steps: int | None = None
    """Then a message follows that nobody can read."""


class FakeRequest:
    def __init__(self, request: GenerateRequest, script: Script) -> None:
        self.request = request
        salt = request.cache_salt
        self.script = msgspec.json.decode(salt, type=Script) if salt.startswith("{") else script
        answers = script.answers if self.script.reply is None else []
        if answers:
            prompt = bytes(id for id in request.prompt_ids if id < 256).decode("utf-8", "replace")
            _, text = max(answers, key=lambda answer: prompt.rfind(answer[0]))
            self.script = msgspec.structs.replace(self.script, reply=list(text.encode()))
        self.made = 0
        self.hold_after = self.script.hold_after
        self.queue_s: float | None = None

    @property
    def held(self) -> bool:
        return self.hold_after is not None and self.made >= self.hold_after


def wait_for_gate(path: str | None) -> None:
    while path is not None and not Path(path).exists():
        time.sleep(0.01)


class FakeEngine:
    def __init__(self, script: Script, config: EngineConfig, commands: str, events: str) -> None:
        self.script = script
        self.config = config
        context = zmq.Context()
        self.commands = context.socket(zmq.PULL)
        self.commands_address = commands
        self.events = context.socket(zmq.PUSH)
        self.events.connect(events)
        self.live: dict[str, FakeRequest] = {}
        self.stats = EngineStats(pages_total=100, pages_free=100)
        self.outputs: list[RequestOutput] = []

    def send(self, event: m.Event) -> None:
        self.events.send(m.encode(event))

    def run(self) -> None:
        script = self.script
        if script.deaf_gate is None:
            self.commands.connect(self.commands_address)
        self.send(m.Starting("weights", 50, 100))
        wait_for_gate(script.start_gate)
        if script.fail_start is not None:
            self.send(m.Failed(script.fail_start))
            time.sleep(0.1)
            sys.exit(1)
        self.send(
            m.Ready(
                pid=os.getpid(),
                model=self.config.model,
                vocab_size=script.vocab_size,
                max_context=script.max_context,
                dtype="float32",
                device="cpu",
                kv_tokens=1000,
                page_size=16,
                kernels=None,
                ready_s=0.0,
                item_tokens=script.item_tokens,
            )
        )
        if script.deaf_gate is not None:
            self.report()
            wait_for_gate(script.deaf_gate)
            self.commands.connect(self.commands_address)
        beat = 0.0
        parent = os.getppid()
        while os.getppid() == parent:
            self.take_commands(0 if self.live else 50)
            if self.live and not self.stuck():
                time.sleep(script.step_s)
                self.step()
            elif self.live:
                time.sleep(0.01)
            self.flush()  # before the report: whoever sees its counts has the outputs already
            if time.monotonic() - beat > 0.1:
                beat = time.monotonic()
                self.report()

    def stuck(self) -> bool:
        limit = self.script.stuck_after_steps
        return limit is not None and self.stats.step >= limit

    def flush(self) -> None:
        if self.outputs:
            self.send(m.Outputs(self.outputs))
            self.outputs = []
            if not self.live:
                self.report()

    def report(self) -> None:
        stats = self.stats
        stats.running = min(len(self.live), self.config.max_batch)
        stats.waiting = len(self.live) - stats.running
        stats.pages_held = 2 * stats.running
        stats.pages_free = stats.pages_total - stats.pages_held
        self.send(m.Stats(stats, time.monotonic()))

    def take_commands(self, wait_ms: int) -> None:
        if wait_ms and not self.commands.poll(wait_ms):
            return
        while self.commands.poll(0):
            command = m.decode_command(self.commands.recv())
            if isinstance(command, m.Submit):
                request = command.request
                assert request.id not in self.live
                if request.prompt_ids == list(b"refuse me"):
                    self.outputs.append(
                        RequestOutput(request.id, [], finish_reason=FinishReason.ERROR, error="refused by the script")
                    )
                    continue
                self.live[request.id] = FakeRequest(request, self.script)
                self.stats.prompt_tokens += len(request.prompt_ids)
            elif isinstance(command, m.Abort):
                if self.live.pop(command.id, None) is not None:
                    self.stats.aborted += command.reason == "abort"
                    self.outputs.append(RequestOutput(command.id, [], finish_reason=FinishReason.ABORT))
            elif isinstance(command, m.Call):
                if command.name == "grammar":
                    text = str(command.arguments["text"])
                    self.send(m.Reply(command.number, {"error": "broken" if "(" in text else None, "busy": False}))
                elif command.name == "release":
                    for live in self.live.values():
                        live.hold_after = None
                    self.send(m.Reply(command.number, {}))
                elif command.name == "echo":
                    self.send(m.Reply(command.number, dict(command.arguments)))
                else:
                    self.send(m.Reply(command.number, error=f"no call named {command.name}"))
            elif isinstance(command, m.Shutdown):
                sys.exit(0)

    def step(self) -> None:
        self.stats.step += 1
        if self.stats.step == self.script.garbage_after_steps:
            self.events.send(b"\xc1 not msgpack")
        for live in list(self.live.values())[: self.config.max_batch]:
            if not live.held:
                self.advance(live)

    def advance(self, live: FakeRequest) -> None:
        request, sampling, script = live.request, live.request.sampling, live.script
        if live.queue_s is None:
            live.queue_s = time.monotonic() - request.arrival
        ids: list[int] = []
        finish, stop_id = None, None
        for _ in range(script.burst):
            ids.append(self.next_token(live))
            live.made += 1
            ends = ids[-1] in sampling.stop_token_ids or (ids[-1] == script.eos_id and not sampling.ignore_eos)
            if ends:
                finish, stop_id = FinishReason.STOP, ids[-1]
            elif live.made >= sampling.max_tokens:
                finish = FinishReason.LENGTH
            if finish:
                break
        if sampling.max_tokens == 0:
            ids, finish, stop_id = [], FinishReason.LENGTH, None
        self.stats.generated_tokens += len(ids)
        wants_scores = sampling.logprobs is not None
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and live.made <= script.burst:
            # In two outputs, as chunks bring them.
            scores = [self.logprobs(id, sampling.prompt_logprobs) for id in request.prompt_ids[1:]]
            self.outputs.append(RequestOutput(request.id, [], prompt_logprobs=scores[:2]))
            prompt_logprobs = scores[2:]
        self.outputs.append(
            RequestOutput(
                request.id,
                ids,
                logprobs=[self.logprobs(id, sampling.logprobs) for id in ids] if wants_scores and ids else None,
                finish_reason=finish,
                stop_token_id=stop_id,
                cached_tokens=script.cached_tokens,
                prompt_logprobs=prompt_logprobs,
                queue_s=live.queue_s,
                scores=fake_scores(request),
            )
        )
        if finish:
            self.stats.finished += 1
            del self.live[request.id]

    def next_token(self, live: FakeRequest) -> int:
        reply, prompt, made = live.script.reply, live.request.prompt_ids, live.made
        if reply is None:
            return prompt[made % len(prompt)]
        return reply[made] if made < len(reply) else live.script.eos_id

    def logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The token itself first; the last alternative is impossible, as a masked token is."""
        ids = [token, *(n for n in range(self.script.vocab_size) if n != token)][:count]
        values = [-0.25 * (n + 1) for n in range(count)]
        if count > 1:
            values[-1] = -math.inf
        return TokenLogprobs(-0.25, 1, ids, values)


def fake_scores(request: GenerateRequest) -> list[list[float]] | None:
    """The log-probability of a label depends on it and on the token that is read, whose row comes from the task."""
    task = request.score
    if task is None:
        return None
    labels = task.labels * len(task.rows) if len(task.labels) == 1 else task.labels
    tokens = [request.prompt_ids[row] for row in task.rows]
    return [[-(label + 1) / 100 - token / 1000 for label in ids] for token, ids in zip(tokens, labels, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--commands", "--events", "--config"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    script = msgspec.json.decode(os.environ.get("FAKE_ENGINE", "{}"), type=Script)
    config = msgspec.json.decode(options.config, type=EngineConfig)
    FakeEngine(script, config, options.commands, options.events).run()


if __name__ == "__main__":
    main()
