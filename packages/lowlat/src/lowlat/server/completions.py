"""`POST /v1/completions`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from lowlat.server import plan as plans
from lowlat.server.bodies import decode_body, read_body
from lowlat.server.errors import bad_field
from lowlat.server.requests import CompletionRequest
from lowlat.server.routes import answer, state_of
from lowlat.server.writers import CompletionWriter

DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's default for completions."""

router = APIRouter()


@router.post("/v1/completions", operation_id="create_completion", summary="Continue one or more prompts")
async def create_completion(request: Request) -> Response:
    arrival = time.monotonic()
    state = state_of(request)
    settings = state.settings
    data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
    body = decode_body(data, CompletionRequest)
    texts = plans.completion_prompts(body, settings.max_prompts)
    state.check_room(len(texts) * min(body.n or 1, settings.max_n))
    model = await state.model()
    plans.check_model(body.model, model.text.name, model.text.path)
    prompts = []
    for number, text in enumerate(texts):
        where = "prompt" if len(texts) == 1 else f"prompt[{number}]"
        if isinstance(text, str):
            prompts.append(await model.text.encode_text(text, where))
        else:
            plans.check_ids(text, where, model.engine.vocab_size)
            prompts.append(text)
    if body.logprobs is not None and body.logprobs > model.engine.vocab_size:
        raise bad_field("logprobs", f"more than the vocabulary's {model.engine.vocab_size} ids")
    plan = plans.make_plan(
        body,
        prompts,
        prompt_field="prompt",
        logprobs=body.logprobs,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        vocab_size=model.engine.vocab_size,
        max_context=model.engine.max_context,
        max_n=settings.max_n,
        config=state.engine.config,
        continues=True,
        echo=bool(body.echo),
    )
    return await answer(request, body, plan, model, CompletionWriter, arrival)
