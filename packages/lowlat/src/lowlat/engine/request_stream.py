"""Outputs on their way from the engine to the reader of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from lowlat.engine.request import RequestOutput

Entry = TypeVar("Entry")


class RequestStream:
    """Outputs of one or more requests that one reader waits for, in order of arrival; ends when all have ended.

    What arrives for a request while the reader is busy is joined into one output, so a slow reader costs no queue.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        self._open = set(ids)
        self._pending: dict[str, RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None
        self.arrivals: dict[str, list[tuple[float, int]]] = {id: [] for id in self._open}
        """Per request: (`time.monotonic()` in seconds, tokens) for each output that brought tokens."""

    def put(self, output: RequestOutput, now: float) -> None:
        """Take in an output that arrived at `now` (`time.monotonic()`); what comes behind a last one is dropped."""
        if output.id not in self._open:
            return
        if output.token_ids:
            self.arrivals[output.id].append((now, len(output.token_ids)))
        if output.finish_reason is not None:
            self._open.discard(output.id)
        earlier = self._pending.get(output.id)
        self._pending[output.id] = output if earlier is None else join_outputs(earlier, output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pending.pop(next(iter(self._pending)))


def join_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One output that says what two of the same request said one after the other."""
    return RequestOutput(
        id=first.id,
        token_ids=first.token_ids + second.token_ids,
        logprobs=_join(first.logprobs, second.logprobs),
        prompt_logprobs=_join(first.prompt_logprobs, second.prompt_logprobs),
        finish_reason=second.finish_reason,
        stop_token_id=second.stop_token_id,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        queue_s=first.queue_s or second.queue_s,
        error=second.error,
        scores=_join(first.scores, second.scores),
    )


def _join(first: list[Entry] | None, second: list[Entry] | None) -> list[Entry] | None:
    return first if second is None else [*(first or []), *second]
