"""What the routes of one server share: the engine, the model's text side, live requests, and who may come in."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.engine.messages import Ready
from lowlat.logs import log_event
from lowlat.server.errors import ApiError, bad_field, unavailable
from lowlat.server.generation import Generation
from lowlat.server.grammar_door import GrammarDoor
from lowlat.server.live import LiveRequest
from lowlat.server.metrics import FrontMetrics
from lowlat.server.plan import Plan
from lowlat.server.settings import ServerSettings
from lowlat.server.text_model import TextModel

Live = TypeVar("Live", bound=LiveRequest)


class ReadyModel(msgspec.Struct, frozen=True):
    """The model as a route needs it: its text side, and what the engine said about it."""

    text: TextModel
    engine: Ready


class ServerState:
    """One server. Belongs to its event loop's thread."""

    def __init__(
        self, settings: ServerSettings, engine: EngineClient, load_text: Callable[[], Awaitable[TextModel]]
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.grammars = GrammarDoor(engine)
        self.metrics = FrontMetrics()
        self.live: dict[str, LiveRequest] = {}
        """Requests by public id, from admission to their last byte."""
        self.draining = False
        self.created = int(time.time())
        self._load_text = load_text
        self._text: asyncio.Future[TextModel] | None = None
        self._sequences = 0
        self._serial = itertools.count(1)

    async def start(self) -> None:
        """Start the engine (if it is not) and the loading of the tokenizer; returns at once."""
        await self.engine.start()
        self._text = asyncio.ensure_future(self._load_text())

    async def model(self) -> ReadyModel:
        """The model, once the engine is ready: a request that comes during a start or restart waits for it.

        Raises:
            ApiError: 503; not within `start_wait_s`, or the engine has failed.
        """
        if self.draining:
            raise unavailable("the server is shutting down")
        assert self._text is not None
        try:
            # A restart may begin between two awaits; the state is looked at last.
            ready = await self.engine.wait_ready(self.settings.start_wait_s)
            text = await asyncio.wait_for(asyncio.shield(self._text), self.settings.start_wait_s)
        except EngineUnavailableError as error:
            raise unavailable(str(error), retry_after=5) from None
        except TimeoutError:
            raise unavailable("the tokenizer is still loading", retry_after=5) from None
        return ReadyModel(text, ready)

    async def text(self) -> TextModel:
        """The text side of the model; raises what its loading raised."""
        assert self._text is not None
        return await asyncio.shield(self._text)

    @property
    def limit(self) -> int:
        """Sequences that may be open at once: those that run and those that wait."""
        return self.engine.config.max_batch + self.settings.max_queue

    @property
    def open_sequences(self) -> int:
        return self._sequences

    def check_room(self, sequences: int) -> None:
        """Raises ApiError: 503 while draining, 429 when the queue has no room for so many sequences."""
        if self.draining:
            raise unavailable("the server is shutting down")
        if sequences > self.limit:
            raise bad_field("n", f"{sequences} sequences in one request; this server's limit is {self.limit}")
        if self._sequences + sequences > self.limit:
            raise ApiError(
                429,
                f"the queue is full: {self._sequences} of {self.limit} sequences are open; try again later",
                type="rate_limit_error",
                code="queue_full",
                retry_after=1,
            )

    def submit(self, request_id: str | None, plan: Plan, text: TextModel, arrival: float) -> Generation:
        """Admit a request and send it to the engine; `release` must follow when its answer is through.

        Raises:
            ApiError: 409 when a live request has the same id; 429, 503 as `check_room`.
        """

        def start(id: str, serial: int) -> Generation:
            generation = Generation(id, plan, text.tokenizer, self.engine, arrival, serial)
            try:
                generation.submit()
            except EngineUnavailableError as error:
                raise unavailable(str(error)) from None
            return generation

        return self.admit(request_id, len(plan.prompts) * plan.n, start)

    def admit(self, request_id: str | None, sequences: int, start: Callable[[str, int], Live]) -> Live:
        """Let a request in that `start` makes of its public id and a serial number; `release` must follow.

        Raises:
            ApiError: 409 when a live request has the same id; 429, 503 as `check_room`.
        """
        self.check_room(sequences)
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif request_id in self.live:
            raise ApiError(
                409,
                f"request_id: {request_id} is the id of a request that is still running",
                param="request_id",
                code="duplicate_request_id",
            )
        live = start(request_id, next(self._serial))
        self.live[request_id] = live
        self._sequences += live.sequences
        return live

    def release(self, generation: LiveRequest) -> None:
        """The request's answer is through, or nobody waits for it: cancel what still runs, count, log."""
        if self.live.get(generation.public_id) is not generation:
            return
        generation.cancel()
        del self.live[generation.public_id]
        self._sequences -= generation.sequences
        usage, timings = generation.usage(), generation.timings()
        self.metrics.request_ended(generation, usage, timings)
        log_event(
            "request",
            request_id=generation.public_id,
            finish=",".join(sorted(set(generation.finish_reasons))),
            choices=generation.sequences,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            completion_tokens=usage.completion_tokens,
            **msgspec.structs.asdict(timings),
        )

    def cancel(self, request_id: str) -> bool:
        """Cancel a live request by its public id; False when no such request runs."""
        generation = self.live.get(request_id)
        if generation is None:
            return False
        generation.cancel()
        return True
