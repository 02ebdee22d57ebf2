"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from lowlat.server import plan as plans
from lowlat.server.bodies import decode_body, read_body
from lowlat.server.chat_messages import chat_of
from lowlat.server.chat_writer import ChatWriter
from lowlat.server.requests import ChatRequest
from lowlat.server.routes import answer, state_of
from lowlat.server.tool_plan import read_tools
from lowlat.server.tool_requests import offered_tools

router = APIRouter()


@router.post("/v1/chat/completions", operation_id="create_chat_completion", summary="Answer a chat")
async def create_chat_completion(request: Request) -> Response:
    arrival = time.monotonic()
    state = state_of(request)
    settings = state.settings
    data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
    body = decode_body(data, ChatRequest)
    logprobs, max_tokens = plans.chat_logprobs(body), plans.chat_max_tokens(body)
    tools = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    chat = chat_of(body.messages, tools, body.chat_template_kwargs)
    state.check_room(min(body.n or 1, settings.max_n))
    model = await state.model()
    plans.check_model(body.model, model.text.name, model.text.path)
    prompt = await model.text.encode_chat(chat)
    plan = plans.make_plan(
        body,
        [prompt],
        prompt_field="messages",
        logprobs=logprobs,
        max_tokens=max_tokens,
        default_max_tokens=None,
        vocab_size=model.engine.vocab_size,
        max_context=model.engine.max_context,
        max_n=settings.max_n,
        config=state.engine.config,
        continues=False,
    )
    plan = read_tools(plan, tools, model.text)
    return await answer(request, body, plan, model, ChatWriter, arrival)
