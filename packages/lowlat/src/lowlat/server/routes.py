"""What routes share: the way from a request on the wire to the response that runs it, and calls of the engine."""

from __future__ import annotations

import time
from typing import cast

from starlette.requests import Request

from lowlat.engine.client import EngineUnavailableError, Value
from lowlat.server.chat_writer import ChatWriter
from lowlat.server.errors import ApiError, bad_field, unavailable
from lowlat.server.generation import Generation
from lowlat.server.plan import Plan
from lowlat.server.requests import GenerationFields
from lowlat.server.responses import AnswerResponse
from lowlat.server.state import ReadyModel, ServerState
from lowlat.server.writers import CompletionWriter, collect, stream


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


async def call_engine(request: Request, name: str, arguments: dict[str, Value]) -> dict[str, Value]:
    """Have the engine do something between two steps.

    Raises:
        ApiError: 503, the engine is not there; 501, it refuses.
    """
    state = state_of(request)
    await state.model()
    try:
        return await state.engine.call(name, arguments)
    except (EngineUnavailableError, TimeoutError) as error:
        raise unavailable(str(error) or "the engine did not answer in time") from None
    except RuntimeError as error:
        raise ApiError(501, str(error), type="server_error") from None


def request_id_of(request: Request, chosen: str | None) -> str | None:
    """The id that the client chose, in the body or as `X-Request-Id`; None: it chose none.

    Raises:
        ApiError: 400; both are given and differ.
    """
    header: str | None = request.scope.get("lowlat_request_id")
    if chosen is not None and header is not None and chosen != header:
        raise bad_field("request_id", "differs from the X-Request-Id header; send one of them")
    return chosen or header


async def begin(request: Request, request_id: str | None, plan: Plan, model: ReadyModel, arrival: float) -> Generation:
    """Submit the plan.

    Raises:
        ApiError: 400; its grammar cannot be followed, or two ids are given; 409, 429, 503 as `ServerState.submit`.
    """
    state = state_of(request)
    if plan.sampling.grammar is not None:
        await state.grammars.check(plan.sampling.grammar, plan.grammar_field)
    return state.submit(request_id_of(request, request_id), plan, model.text, arrival)


async def answer(
    request: Request,
    body: GenerationFields,
    plan: Plan,
    model: ReadyModel,
    writer: type[CompletionWriter] | type[ChatWriter],
    arrival: float,
) -> AnswerResponse:
    """Begin, and return the response that sends what comes of it. Raises ApiError as `begin`."""
    state = state_of(request)
    generation = await begin(request, body.request_id, plan, model, arrival)
    words = writer(generation, model.text.name, int(time.time()))
    if body.stream:
        options = body.stream_options
        chunks = stream(generation, words, bool(options is not None and options.include_usage))
    else:
        chunks = collect(generation, words)
    return AnswerResponse(generation, chunks, state.release, streamed=bool(body.stream))
