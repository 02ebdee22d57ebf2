"""`POST /v1/responses`: the OpenAI Responses API over chats, without a memory of its own."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from lowlat.server.bodies import decode_struct, read_body
from lowlat.server.chat_plan import plan_chat
from lowlat.server.errors import ApiError
from lowlat.server.responses import AnswerResponse
from lowlat.server.responses_requests import NAMES, ResponsesRequest, renamed, to_chat
from lowlat.server.responses_writer import ResponsesWriter
from lowlat.server.routes import begin, state_of

router = APIRouter()


@router.post("/v1/responses", operation_id="create_response", summary="Answer input items with output items")
async def create_response(request: Request) -> Response:
    """Stateless: the client sends the whole conversation each time."""
    arrival = time.monotonic()
    state = state_of(request)
    data = await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s)
    body = decode_struct(data, ResponsesRequest)
    chat = to_chat(body)
    try:
        plan, model = await plan_chat(request, chat)
        generation = await begin(request, chat.request_id, plan, model, arrival)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    writer = ResponsesWriter(generation, body, model.text.name, model.text.tokenizer, int(time.time()))
    chunks = writer.chunks() if body.stream else writer.whole()
    return AnswerResponse(generation, chunks, state.release, streamed=bool(body.stream))
