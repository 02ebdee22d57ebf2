"""Where requests wait until their grammar has compiled, in a process of its own, while steps go on."""

from __future__ import annotations

from collections.abc import Callable

from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput
from lowlat.grammars.grammar import Grammar, GrammarError
from lowlat.grammars.matcher import GrammarLine
from lowlat.grammars.pool import GrammarPool, GrammarProcess

_NAP_S = 0.01


class GrammarGate:
    """Requests and questions about grammars, each with the process that it waits for."""

    def __init__(self, pool: GrammarPool, eos_ids: tuple[int, ...]) -> None:
        self._pool = pool
        self._eos_ids = eos_ids
        self._requests: dict[str, tuple[GenerateRequest, GrammarProcess]] = {}
        self._questions: list[tuple[GrammarProcess, Callable[[GrammarError | None], None]]] = []
        self._outputs: list[RequestOutput] = []

    @property
    def waiting(self) -> bool:
        """Whether `turn` has anything to do."""
        return bool(self._requests or self._questions or self._outputs)

    def ask(self, grammar: Grammar, answer: Callable[[GrammarError | None], None]) -> None:
        """Call `answer` with the reason why a grammar cannot be used, or None, now or in a later `turn`."""
        try:
            self._questions.append((self._pool.use(grammar), answer))
        except GrammarError as error:
            answer(error)

    def add(self, request: GenerateRequest) -> None:
        """Hold a request until its grammar has compiled. Raises `ValueError` when its id or grammar is of no use."""
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is already in use")
        assert request.sampling.grammar is not None
        try:
            self._requests[request.id] = request, self._pool.use(request.sampling.grammar)
        except GrammarError as error:
            raise ValueError(f"grammar: {error}") from None

    def abort(self, request_id: str, reason: FinishReason) -> bool:
        """End a request that waits here; false when it does not."""
        found = self._requests.pop(request_id, None)
        if found is None:
            return False
        found[1].release()
        self._outputs.append(RequestOutput(request_id, [], finish_reason=reason))
        return True

    def turn(self, idle: bool, start: Callable[[GenerateRequest, GrammarLine], None]) -> list[RequestOutput]:
        """`start` requests whose grammar has compiled, and answer questions; `idle`: there is time to wait a little.

        Returns the outputs of requests that ended here. `start` may raise `ValueError`, which ends a request.
        """
        self._pool.poll(_NAP_S if idle else 0.0)
        for process, answer in [question for question in self._questions if question[0].settled]:
            self._questions.remove((process, answer))
            process.release()
            answer(None if process.error is None else GrammarError(process.error))
        for request, process in [held for held in self._requests.values() if held[1].settled]:
            del self._requests[request.id]
            self._begin(request, process, start)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _begin(
        self, request: GenerateRequest, process: GrammarProcess, start: Callable[[GenerateRequest, GrammarLine], None]
    ) -> None:
        error = None if process.error is None else f"grammar: {process.error}"
        if error is None:
            try:
                start(request, GrammarLine(process, self._eos_ids, request.sampling.stop_token_ids))
                return
            except ValueError as refusal:
                error = str(refusal)
        process.release()
        self._outputs.append(RequestOutput(request.id, [], finish_reason=FinishReason.ERROR, error=error))

    def close(self) -> None:
        """End all grammar processes."""
        self._pool.close()
