"""From a chat request, whichever API it came by, to the plan that the engine is asked to follow."""

from __future__ import annotations

from starlette.requests import Request

from lowlat.server import plan as plans
from lowlat.server.chat_messages import chat_of, with_effort
from lowlat.server.plan import Plan
from lowlat.server.requests import ChatRequest
from lowlat.server.routes import state_of
from lowlat.server.state import ReadyModel
from lowlat.server.tool_plan import read_tools
from lowlat.server.tool_requests import offered_tools


async def plan_chat(request: Request, body: ChatRequest) -> tuple[Plan, ReadyModel]:
    """Check everything, wait for the model, and render the chat.

    Raises:
        ApiError: 400 naming the field; 404, 429 and 503 as every generating route.
    """
    state = state_of(request)
    settings = state.settings
    logprobs, max_tokens = plans.chat_logprobs(body), plans.chat_max_tokens(body)
    tools = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    chat = chat_of(body.messages, tools, body.chat_template_kwargs)
    state.check_room(min(body.n or 1, settings.max_n))
    model = await state.model()
    plans.check_model(body.model, model.text.name, model.text.path)
    chat = with_effort(chat, body.reasoning_effort, model.text.chat_template)
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
    return read_tools(plan, tools, model.text), model
