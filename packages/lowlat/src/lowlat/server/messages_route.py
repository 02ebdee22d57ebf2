"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic Messages API over chats."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response

from lowlat.server import plan as plans
from lowlat.server.bodies import decode_struct, read_body
from lowlat.server.chat_messages import chat_of
from lowlat.server.chat_plan import plan_chat
from lowlat.server.errors import ApiError
from lowlat.server.messages_answers import TokenCount
from lowlat.server.messages_requests import NAMES, ChatPart, CountTokensRequest, MessagesRequest, chat_part, to_chat
from lowlat.server.messages_writer import MessagesWriter
from lowlat.server.replies import json_reply
from lowlat.server.requests import ChatRequest
from lowlat.server.responses import AnswerResponse
from lowlat.server.responses_requests import renamed
from lowlat.server.routes import begin, state_of
from lowlat.server.text_model import TextModel
from lowlat.server.tool_requests import offered_tools

router = APIRouter()


@router.post("/v1/messages", operation_id="create_message", summary="Answer a chat, with the Messages API")
async def create_message(request: Request) -> Response:
    arrival = time.monotonic()
    state = state_of(request)
    data = await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s)
    body = decode_struct(data, MessagesRequest)
    chat = to_chat(body)
    try:
        plan, model = await plan_chat(request, thinking(body, chat, (await state.model()).text))
        generation = await begin(request, chat.request_id, plan, model, arrival)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    writer = MessagesWriter(generation, model.text.name)
    chunks = writer.chunks() if body.stream else writer.whole()
    return AnswerResponse(generation, chunks, state.release, streamed=bool(body.stream))


@router.post("/v1/messages/count_tokens", operation_id="count_tokens", summary="Count the tokens of a chat")
async def count_tokens(request: Request) -> Response:
    state = state_of(request)
    data = await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s)
    body = decode_struct(data, CountTokensRequest)
    model = await state.model()
    plans.check_model(body.model, model.text.name, model.text.path)
    chat = thinking(body, chat_part(body), model.text)
    tools = offered_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    ids = await model.text.encode_chat(chat_of(chat.messages, tools, chat.chat_template_kwargs))
    return json_reply(TokenCount(len(ids)))


def thinking(body: ChatPart, chat: ChatRequest, text: TextModel) -> ChatRequest:
    """The chat with the template's variable for thinking, where it has one and the client says something of it."""
    template = text.chat_template
    if body.thinking is None or template is None or not template.mentions("enable_thinking"):
        return chat
    found = {"enable_thinking": body.thinking.type != "disabled", **(chat.chat_template_kwargs or {})}
    return msgspec.structs.replace(chat, chat_template_kwargs=found)
