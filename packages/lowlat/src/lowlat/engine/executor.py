"""Executors: where the steps of a scheduler run. The engine sees only launches and results, in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from lowlat.engine.batch import StepPlan
from lowlat.engine.request import TokenLogprobs


class StepResult(msgspec.Struct):
    """What a step sampled: a token for each sample of its plan, in order.

    With `counts`, so many tokens for each sample instead: a decode slot brings several where guesses were right, and
    none where its answer had reached its end in a step before. `logprobs` are by token.
    """

    step: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] | None = None
    """For each chunk with targets, in order: one entry for each target that is a token."""
    counts: list[int] | None = None
    guessed: int = 0
    """Guessed tokens that the step checked."""
    label_logprobs: list[list[list[float]]] | None = None
    """For each chunk with rows to read, in order, and each of those: the log-probabilities of its labels."""
    bad_slots: list[int] = []
    """Slots whose logits were not numbers: they have no tokens, and their scores here mean nothing."""
    spent: float = 0.0
    """Seconds of a step of decodes alone where steps may check guesses, and `plain`: what it would have taken with
    none."""
    plain: float = 0.0
    over: dict[int, str | None] = {}
    """By number of a sample in the plan: its answer ends after these tokens, since its grammar is complete (None) or
    for the reason given."""


class ExecutorError(Exception):
    """A step or a rank failed; the executor takes no more steps."""


class Executor(Protocol):
    """Runs steps in the order of their launches."""

    def launch(self, plan: StepPlan) -> None:
        """Queue a step; returns before it is done. The plan must not change afterwards."""

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest result not collected; None after `timeout` seconds. Raises `ExecutorError`."""

    def close(self) -> None:
        """End threads and ranks."""


class ThreadExecutor:
    """Runs steps in a thread of this process, so that the host works while the device computes.

    `run` computes one step. It is called in the thread only, in order; `start` runs there before the first step. The
    thread ends with `close`, or when nobody holds the executor any more.
    """

    def __init__(self, run: Callable[[StepPlan], StepResult], start: Callable[[], None] | None = None) -> None:
        self.run = run
        """What computes a step."""
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._failure: ExecutorError | None = None
        # The thread must not hold the executor: it would keep a dropped engine, and its model, for ever.
        work = (self._plans, self._results, run, start)
        self._thread = threading.Thread(target=_run_steps, args=work, name="executor", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._plans.put, None)

    def launch(self, plan: StepPlan) -> None:
        """Queue a step."""
        self._plans.put(plan)

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest result; None after `timeout` seconds. Raises `ExecutorError` with the step's error, and after it
        at every call."""
        if self._failure is not None:
            raise self._failure
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            self._failure = ExecutorError(f"{type(result).__name__}: {result}")
            raise self._failure from result
        return result

    def close(self) -> None:
        """Let the running step end, and the thread."""
        self._plans.put(None)
        self._thread.join(timeout=30)


def _run_steps(
    plans: queue.SimpleQueue[StepPlan | None],
    results: queue.SimpleQueue[StepResult | BaseException],
    run: Callable[[StepPlan], StepResult],
    start: Callable[[], None] | None,
) -> None:
    try:
        if start is not None:
            start()
        while (plan := plans.get()) is not None:
            results.put(run(plan))
    except BaseException as error:  # every failure must reach the engine, or it would wait for ever
        results.put(error)


class ScriptedExecutor:
    """Takes no time: results come from `token`, a function of (slot, position) of the sampled token.

    For tests of the engine and for benchmarks of its host cost; the log tells the order of events.
    """

    def __init__(self, token: Callable[[int, int], int], *, keep_log: bool = False) -> None:
        self._token = token
        self._results: deque[StepResult] = deque()
        self._lengths: dict[int, int] = {}
        self.log: list[tuple[str, int]] | None = [] if keep_log else None
        """("launch" or "result", step), in order."""

    def launch(self, plan: StepPlan) -> None:
        """Compute the step's tokens at once."""
        if self.log is not None:
            self.log.append(("launch", plan.step))
        tokens = []
        for chunk in plan.chunks:
            end = self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
            if chunk.sample:
                tokens.append(self._token(chunk.slot, end))
        for slot in plan.decodes:
            self._lengths[slot] += 1
            tokens.append(self._token(slot, self._lengths[slot]))
        self._results.append(StepResult(plan.step, tokens))

    def collect(self, timeout: float | None) -> StepResult | None:
        """The oldest result."""
        if not self._results:
            return None
        result = self._results.popleft()
        if self.log is not None:
            self.log.append(("result", result.step))
        return result

    def close(self) -> None:
        """Nothing to end."""
