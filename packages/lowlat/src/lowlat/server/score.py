"""`POST /v1/score`: probabilities of named tokens behind query and item, without generation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from lowlat.engine.score_client import score_limits
from lowlat.engine.score_waves import Readings
from lowlat.engine.scoring import Mode, ScoreInput, ScorePlan, can_mis, choose_mode, plan_score, score_of
from lowlat.server import plan as plans
from lowlat.server.bodies import decode_struct, read_body
from lowlat.server.errors import bad_field
from lowlat.server.responses import AnswerResponse
from lowlat.server.routes import request_id_of, state_of
from lowlat.server.score_requests import (
    ScoreAnswer,
    ScoreFields,
    ScoreRequest,
    Values,
    check_temperature,
    score_input,
)
from lowlat.server.score_run import ScoreRun
from lowlat.server.state import ReadyModel
from lowlat.text.output import finite_logprob

router = APIRouter()

Form = TypeVar("Form", bound=ScoreFields)


@router.post("/v1/score", operation_id="create_score", summary="Probabilities of labels behind query and items")
async def create_score(request: Request) -> Response:
    arrival = time.monotonic()
    body, model = await scoring_request(request, ScoreRequest)
    state = state_of(request)
    temperature = check_temperature(body)
    asked = await score_input(body, model, state.settings.max_score_items)
    run = submit_score(request, body, asked, model, arrival)

    async def answer() -> AsyncIterator[bytes]:
        readings = await run.run()
        wanted, nested = bool(body.apply_softmax), asked.extraction is not None
        scores = [[score_of(reading, wanted, temperature) for reading in item] for item in readings]
        logprobs = [[list(map(finite_logprob, reading)) for reading in item] for item in readings]
        yield msgspec.json.encode(
            ScoreAnswer(
                **heading("score", run, model),
                scores=_by_item(scores, nested),
                token_logprobs=_by_item(logprobs, nested) if body.return_token_logprobs else None,
            )
        )

    return AnswerResponse(run, answer(), state.release, streamed=False)


async def scoring_request(request: Request, form: type[Form]) -> tuple[Form, ReadyModel]:
    """The body of a scoring route, and the model, once it is there.

    Raises:
        ApiError: as `read_body`, `decode_struct` and `ServerState.model`; 404 for another model's name.
    """
    state = state_of(request)
    data = await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s)
    body = decode_struct(data, form)
    state.check_room(0)
    model = await state.model()
    plans.check_model(body.model, model.text.name, model.text.path)
    return body, model


def heading(route: str, run: ScoreRun, model: ReadyModel) -> dict[str, Any]:
    """The fields of a `ScoringAnswer`, when all is computed."""
    return {
        "id": f"{route}-{run.public_id}",
        "created": int(time.time()),
        "model": model.text.name,
        "mode": run.mode,
        "usage": run.usage(),
        "timings": run.timings(),
    }


def submit_score(request: Request, body: ScoreFields, asked: ScoreInput, model: ReadyModel, arrival: float) -> ScoreRun:
    """Admit a scoring request; its sequences start when it is run.

    Raises:
        ApiError: 400 where `mode` asks for what the model cannot; 409, 429, 503 as `ServerState.admit`.
    """
    state = state_of(request)
    plan = _plan(body, asked, model, request)
    fields = {"priority": body.priority or 0, "cache_salt": body.cache_salt or ""}
    return state.admit(
        request_id_of(request, body.request_id),
        plan.most,
        lambda id, serial: ScoreRun(id, plan, len(asked.items), state.engine, arrival, serial, **fields),
    )


def _plan(body: ScoreFields, asked: ScoreInput, model: ReadyModel, request: Request) -> ScorePlan:
    state = state_of(request)
    limits = score_limits(state.engine.config, model.engine)
    wanted = body.mode or "auto"
    mode: Mode
    if wanted == "mis":
        if (why := can_mis(asked, limits)) is not None:
            raise bad_field("mode", f"mis: {why}; send sis or auto", code="unsupported")
        mode = "mis"
    elif wanted == "auto":
        mode = choose_mode(asked, limits, state.settings.score_mode)
    else:
        mode = "sis"
    return plan_score(asked, mode, limits)


def _by_item(readings: Readings, nested: bool) -> Values:
    """By item and label; with an extraction token, by place in between."""
    return [list(places) if nested else list(places[0]) for places in readings]
