"""An engine of two ranks in a process of its own: rank 1 is killed while tokens come, or all ends as it should.

    python lost_rank.py MODEL DTYPE kill|close

Whoever starts it looks at how the process ends, too: nothing that waited for a lost rank may outlive the engine.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

from lowlat.engine.executor import ExecutorError
from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine

SETTINGS: dict[str, Any] = {
    "device": "cuda", "max_batch": 4, "max_context": 256, "kv_tokens": 2048, "run_ahead": 2, "low_latency": "off",
    "tensor_parallel": 2, "watchdog_s": 20,
}  # fmt: skip


class Clock:
    """Tells what took how long."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, what: str) -> float:
        """Seconds since it spoke last."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        print(f"{what}: {seconds:.2f} s", flush=True)
        return seconds


def lose(engine: Engine, clock: Clock) -> None:
    """Kill rank 1 behind the first token; the request must end with an error that says so."""
    stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=200, temperature=0))
    next(stream)
    rank = engine._core.executor._group._processes[0]
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    clock.say("killed")
    try:
        for _ in stream:
            pass
    except ExecutorError as error:
        print(f"the request's error: {error}", flush=True)
    else:
        raise AssertionError("nobody was missed")
    assert clock.say("noticed") < 25


def main() -> None:
    model, dtype, what = sys.argv[1:]
    clock = Clock()
    engine = Engine(model=model, dtype=dtype, **SETTINGS)
    clock.say("ready")
    try:
        if what == "kill":
            lose(engine, clock)
        else:
            engine.generate([1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
    finally:
        engine.close()
    clock.say("closed")
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(f"threads left: {left}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
