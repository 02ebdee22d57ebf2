"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from lowlat.server.bodies import decode_body, read_body
from lowlat.server.chat_plan import plan_chat
from lowlat.server.chat_writer import ChatWriter
from lowlat.server.requests import ChatRequest
from lowlat.server.routes import answer, state_of

router = APIRouter()


@router.post("/v1/chat/completions", operation_id="create_chat_completion", summary="Answer a chat")
async def create_chat_completion(request: Request) -> Response:
    arrival = time.monotonic()
    settings = state_of(request).settings
    data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
    body = decode_body(data, ChatRequest)
    plan, model = await plan_chat(request, body)
    return await answer(request, body, plan, model, ChatWriter, arrival)
