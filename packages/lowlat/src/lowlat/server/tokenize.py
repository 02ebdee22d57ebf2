"""`POST /v1/tokenize` and `/v1/detokenize`: ids of a text or chat as the model would get them, and text of ids."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from lowlat.server import plan as plans
from lowlat.server.bodies import decode_struct, read_body
from lowlat.server.chat_messages import chat_of
from lowlat.server.errors import bad_field
from lowlat.server.replies import json_reply
from lowlat.server.requests import Message, TemplateKey, TokenId
from lowlat.server.routes import state_of
from lowlat.server.text_model import LONG_TEXT
from lowlat.server.tool_requests import Tools, offered_tools

router = APIRouter()


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tokenize`: either `prompt` or `messages`."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=65536)] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: whether the model's own frame (BOS) is added, as `/v1/completions` does; default true."""
    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[TemplateKey, Any], Meta(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    """Of messages: whether the answer's beginning follows, as `/v1/chat/completions` does; default true."""
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/tokenize`."""

    object: str = "tokenization"
    model: str
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/detokenize`."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
    """Whether control tokens are left out; default false."""


class Detokenized(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/detokenize`."""

    object: str = "detokenization"
    model: str
    prompt: str


@router.post("/v1/tokenize", operation_id="tokenize", summary="Ids of a text or of a chat")
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = decode_struct(
        await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s), TokenizeRequest
    )
    model = await state.model()
    text = model.text
    plans.check_model(body.model, text.name, text.path)
    if body.messages is not None:
        if body.prompt is not None:
            raise bad_field("prompt", "send either prompt or messages")
        if body.add_special_tokens is not None:
            raise bad_field("add_special_tokens", "belongs to prompt; the template of a chat writes its own frame")
        tools = offered_tools(body.tools, None, None)
        chat = chat_of(body.messages, tools, body.chat_template_kwargs, body.add_generation_prompt is not False)
        ids = await text.encode_chat(chat)
    elif body.prompt is not None:
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise bad_field(name, "belongs to messages")
        ids = await text.encode(body.prompt, body.add_special_tokens is not False)
    else:
        raise bad_field("prompt", "send prompt or messages", code="missing_field")
    return json_reply(
        Tokenized(
            model=text.name,
            count=len(ids),
            max_model_len=model.engine.max_context,
            tokens=ids,
            token_strs=[text.tokenizer.token_text(id) for id in ids] if body.return_token_strs else UNSET,
        )
    )


@router.post("/v1/detokenize", operation_id="detokenize", summary="Text of token ids")
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = decode_struct(
        await read_body(request, state.settings.max_body_bytes, state.settings.body_timeout_s), DetokenizeRequest
    )
    model = await state.model()
    text = model.text
    plans.check_model(body.model, text.name, text.path)
    if body.tokens:
        plans.check_ids(body.tokens, "tokens", model.engine.vocab_size)
    skip = bool(body.skip_special_tokens)
    if len(body.tokens) < LONG_TEXT:
        prompt = text.tokenizer.decode(body.tokens, skip)
    else:
        prompt = await asyncio.to_thread(text.tokenizer.decode, body.tokens, skip)
    return json_reply(Detokenized(model=text.name, prompt=prompt))
