"""`GET /v1/models`: the model that this server serves. Answers once the model can be used."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lowlat.server.answers import Model, ModelList
from lowlat.server.plan import check_model
from lowlat.server.replies import json_reply
from lowlat.server.routes import state_of

router = APIRouter()


async def _model(request: Request) -> tuple[Model, str]:
    state = state_of(request)
    model = await state.model()
    served = Model(id=model.text.name, created=state.created, max_model_len=model.engine.max_context)
    return served, model.text.path


@router.get("/v1/models", operation_id="list_models", summary="List the served model")
async def list_models(request: Request) -> Response:
    served, _ = await _model(request)
    return json_reply(ModelList(data=[served]))


@router.get("/v1/models/{name:path}", operation_id="get_model", summary="Describe the served model")
async def get_model(name: str, request: Request) -> Response:
    served, path = await _model(request)
    check_model(name, served.id, path)
    return json_reply(served)
