"""`GET /v1/info`: what runs here, so that nobody has to guess which kernels or limits answer."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from lowlat.server.replies import json_reply
from lowlat.server.routes import state_of

router = APIRouter()


class Info(msgspec.Struct, kw_only=True):
    version: str
    model: str
    dtype: str
    device: str
    kernels: str | None
    """Name of the active kernel library; null: the general path."""
    max_context: int
    kv_tokens: int
    page_size: int
    vocab_size: int
    max_batch: int
    max_queue: int
    restarts: int
    spec: str
    simulated_acceptance: float | None
    """Tokens a step that a benchmark counts as right; null: answers are the model's."""


@router.get("/v1/info", operation_id="info", summary="What runs here, and its limits")
async def info(request: Request) -> Response:
    state = state_of(request)
    model = await state.model()
    engine, config = model.engine, state.engine.config
    return json_reply(
        Info(
            version=request.app.version,
            model=model.text.name,
            dtype=engine.dtype,
            device=engine.device,
            kernels=engine.kernels,
            max_context=engine.max_context,
            kv_tokens=engine.kv_tokens,
            page_size=engine.page_size,
            vocab_size=engine.vocab_size,
            max_batch=config.max_batch,
            max_queue=state.settings.max_queue,
            restarts=state.engine.restarts,
            spec=config.spec,
            simulated_acceptance=config.spec_simulate_acceptance,
        )
    )
