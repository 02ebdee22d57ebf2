"""One scoring request in the engine: its sequences, wave by wave, to log-probabilities by item."""

from __future__ import annotations

import time
from typing import Any

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.engine.request import FinishReason
from lowlat.engine.score_waves import Readings, ScoreWaves
from lowlat.engine.scoring import ScorePlan
from lowlat.server.answers import PromptTokensDetails, Timings, Usage
from lowlat.server.errors import ApiError, engine_failed, unavailable


class ScoreRun:
    """A live request (`LiveRequest`); `run` it once."""

    def __init__(
        self,
        public_id: str,
        plan: ScorePlan,
        items: int,
        engine: EngineClient,
        arrival: float,
        serial: int,
        **fields: Any,
    ) -> None:
        """`arrival`: `time.monotonic()` of the request; `serial`: a number no other request of this process has;
        `fields`: see `request_of`."""
        self.public_id = public_id
        self.arrival = arrival
        self.mode = plan.mode
        self._plan = plan
        self._waves = ScoreWaves(plan, f"{serial:x}", items, arrival=arrival, **fields)
        self._engine = engine
        self._cancelled = False
        self._done = False
        self._ended_at: float | None = None

    @property
    def sequences(self) -> int:
        return self._plan.most

    async def run(self) -> Readings:
        """What the engine reads.

        Raises:
            ApiError: 409 when the request was cancelled; 500, 503 when the engine failed.
        """
        try:
            while requests := self._waves.next_wave():
                if self._cancelled:
                    raise _cancelled()
                try:
                    stream = self._engine.submit(*requests)
                except EngineUnavailableError as error:
                    raise unavailable(str(error)) from None
                async for output in stream:
                    self._waves.take(output)
                    if output.finish_reason is FinishReason.ERROR:
                        raise engine_failed(output.error or "the engine could not finish this request")
                    if output.finish_reason is FinishReason.ABORT:
                        raise _cancelled()
            self._done = True
        finally:
            self.cancel()
            self._ended_at = time.monotonic()
        return self._waves.readings

    def cancel(self) -> None:
        """End every sequence that still runs; no further one starts."""
        self._cancelled = True
        for id in list(self._waves.open):
            self._engine.abort(id)

    @property
    def finish_reasons(self) -> list[str]:
        return ["length" if self._done else "abort"]

    def usage(self) -> Usage:
        """Tokens of all sequences: in `sis`, the query counts with each item, and is found in the cache for most."""
        prompt = self._plan.prompt_tokens
        return Usage(prompt, 0, prompt, PromptTokensDetails(self._waves.cached_tokens))

    def timings(self) -> Timings:
        return Timings(
            queue_s=round(self._waves.queue_s or 0.0, 6),
            first_token_s=None,
            total_s=round((self._ended_at or time.monotonic()) - self.arrival, 6),
            gap_mean_ms=None,
            gap_p90_ms=None,
        )


def _cancelled() -> ApiError:
    return ApiError(409, "the request was cancelled before all items were scored", code="cancelled")
