"""The engine's loop: submit, plan, launch, collect, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lowlat.engine.executor import Executor
from lowlat.engine.grammar_gate import GrammarGate
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput
from lowlat.engine.scheduler import Scheduler
from lowlat.engine.stats import EngineStats
from lowlat.grammars.grammar import Grammar, GrammarError

if TYPE_CHECKING:
    from lowlat_plugin import LowLatency

NO_GRAMMARS = "grammars are not followed with --spec-simulate-acceptance, whose answers mean nothing"


class EngineCore:
    """Joins a scheduler and an executor; single-threaded, driven by calls of `turn`.

    With `run_ahead` n, up to n steps are launched beyond the one whose result is read next, so the executor never
    waits for the host.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        run_ahead: int,
        low_latency: LowLatency | None = None,
        grammars: GrammarGate | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.run_ahead = run_ahead
        self.low_latency = low_latency
        self.grammars = grammars
        self._held = False
        """Whether anything may wait for a grammar: one look a turn for requests without."""

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `ValueError` when it cannot be taken (see `Scheduler.add`, `GrammarGate.add`)."""
        if request.sampling.grammar is None:
            self.scheduler.add(request)
        elif self.grammars is None:
            raise ValueError(f"grammar: {NO_GRAMMARS}")
        else:
            self.grammars.add(request)
            self._held = True

    def ask(self, grammar: Grammar, answer: Callable[[GrammarError | None], None]) -> None:
        """Whether a grammar can be followed; see `GrammarGate.ask`. Raises `ValueError` where none is."""
        if self.grammars is None:
            raise ValueError(NO_GRAMMARS)
        self.grammars.ask(grammar, answer)
        self._held = True

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request early; false when it is not live. Its last output comes with the next `turn`."""
        held = self.grammars is not None and self.grammars.abort(request_id, reason)
        return held or self.scheduler.abort(request_id, reason)

    def end_session(self, session_id: str, salt: str = "") -> bool:
        """Give back what a session pins; false when none of this id and salt is known."""
        return self.scheduler.cache.sessions.end(session_id, salt)

    @property
    def has_work(self) -> bool:
        """Whether `turn` has anything to do."""
        return self.scheduler.has_work or self._held

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.has_requests or self._held

    def turn(self, timeout: float | None = None) -> list[RequestOutput]:
        """Launch what can be launched, then wait up to `timeout` seconds for one result and commit it.

        Returns the outputs since the last turn. Raises `ExecutorError`.
        """
        scheduler = self.scheduler
        outputs: list[RequestOutput] = []
        if self._held and self.grammars is not None:
            outputs = self.grammars.turn(not scheduler.has_work, scheduler.add)
            self._held = self.grammars.waiting
        while scheduler.in_flight <= self.run_ahead:
            plan = scheduler.schedule()
            if plan is None:
                break
            plan.general = self.low_latency is not None and not self.low_latency.switched_on
            self.executor.launch(plan)
        if scheduler.in_flight:
            result = self.executor.collect(timeout)
            if result is not None:
                scheduler.commit(result)
        return outputs + scheduler.take_outputs() if outputs else scheduler.take_outputs()

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        stats = self.scheduler.refresh_stats()
        if self.low_latency is not None:
            counts = self.low_latency.counters.snapshot()
            stats.low_latency_steps = [(path, reason, count) for (path, reason), count in counts.items()]
        return stats

    def close(self) -> None:
        """End the executor and grammar processes."""
        self.executor.close()
        if self.grammars is not None:
            self.grammars.close()
