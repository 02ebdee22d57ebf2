"""The engine's process with its own loop, scheduler and prefix cache, over a device that checks what it reads.

Started like the engine. The device is `kv_simulator.KVSimulator`: each token depends on all tokens before it, so an
answer equals its solo run only if every page, table and prefix hit was right; whatever is not right ends the process.
The environment variable FAKE_ENGINE holds the shape as JSON (see `Shape`).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from kv_simulator import KVSimulator, make_core

import lowlat_plugin
from lowlat.engine import messages as m
from lowlat.engine import process
from lowlat.engine.batch import StepPlan
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import RequestOutput, TokenLogprobs
from lowlat.engine.stats import EngineStats

VOCAB_SIZE = 262


class Shape(msgspec.Struct, kw_only=True):
    pages: int = 200
    page_size: int = 4
    chunk_tokens: int = 16
    run_ahead: int = 1
    max_context: int = 128
    step_s: float = 0.0
    width: int = 1
    """Rows of a request in a decode step: above 1, some guesses are right and some are wrong."""
    pause_at: list[int] = []
    """Launches, counted from 1, before which the process stands still until SIGCONT."""
    report_s: float = 1.0


class Device:
    """The simulator with steps that take time, and with log-probabilities."""

    def __init__(self, simulator: KVSimulator, shape: Shape) -> None:
        self.simulator = simulator
        self.shape = shape
        self.launches = 0

    def launch(self, plan: StepPlan) -> None:
        self.launches += 1
        if self.launches in self.shape.pause_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(self.shape.step_s)
        self.simulator.launch(plan)
        result, _ = self.simulator.results[-1]
        result.logprobs = [
            TokenLogprobs(-0.01 * token, 1, [token, 60], [-0.01 * token, -math.inf]) for token in result.tokens
        ]
        # A prompt token's score is made of the token alone, so order and number can be checked.
        result.prompt_logprobs = [
            [TokenLogprobs(-0.01 * score.logprob, 2, [61], [-math.inf]) for score in scores]
            for scores in result.prompt_logprobs
        ]
        result.label_logprobs = [
            [[label_logprob(score) for score in scores] for scores in reads] for reads in result.label_logprobs
        ]

    def collect(self, timeout: float | None) -> object:
        return self.simulator.collect(timeout)

    def close(self) -> None:
        pass


def label_logprob(score: float) -> float:
    """A log-probability from the simulator's score: in the order of the scores, and all of a vocabulary's below 1."""
    return 5e-6 * (score - 1_000_003) - math.log(VOCAB_SIZE)


class NoKernels:
    """What the admin route asks about, where there are no kernels."""

    def __init__(self) -> None:
        self.on = True

    def switch(self, on: bool) -> None:
        self.on = on

    def report(self) -> lowlat_plugin.Report:
        return lowlat_plugin.Report(policy="off", state="none", on=self.on)


class CheckedCore:
    """An `EngineCore` whose books are checked after every turn."""

    def __init__(self, core: EngineCore, simulator: KVSimulator) -> None:
        self._core = core
        self._simulator = simulator
        self.submit, self.abort = core.submit, core.abort
        self.ask, self.end_session = core.ask, core.end_session
        self.low_latency = NoKernels()

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def has_requests(self) -> bool:
        return self._core.has_requests

    def turn(self, timeout: float | None = None) -> list[RequestOutput]:
        outputs = self._core.turn(timeout)
        self._core.scheduler.check()
        self._simulator.check()
        return outputs

    def stats(self) -> EngineStats:
        return self._core.stats()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--commands", "--events", "--config"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    shape = msgspec.json.decode(os.environ.get("FAKE_ENGINE", "{}"), type=Shape)
    config = msgspec.json.decode(options.config, type=EngineConfig)
    context = zmq.Context()
    commands, events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(options.commands)
    events.connect(options.events)
    core, simulator = make_core(
        pages=shape.pages,
        page_size=shape.page_size,
        max_batch=config.max_batch,
        chunk_tokens=shape.chunk_tokens,
        run_ahead=shape.run_ahead,
        max_context=shape.max_context,
        width=shape.width,
    )
    core.executor = Device(simulator, shape)
    process._STATS_S = shape.report_s
    events.send(
        m.encode(
            m.Ready(
                pid=os.getpid(),
                model=config.model,
                vocab_size=VOCAB_SIZE,
                max_context=shape.max_context,
                dtype="float32",
                device="cpu",
                kv_tokens=shape.pages * shape.page_size,
                page_size=shape.page_size,
                kernels=None,
                ready_s=0.0,
                item_tokens=100,
            )
        )
    )
    try:
        process.EngineLoop(CheckedCore(core, simulator), commands, events).run()
    except BaseException as error:
        events.send(m.encode(m.Failed(f"{type(error).__name__}: {error}")))
        raise
    finally:
        context.destroy(linger=1000)
    os._exit(0)  # taking the interpreter apart costs seconds, and tests nothing


if __name__ == "__main__":
    main()
