"""The server's description of itself: its forms come from the very structs that it decodes and encodes."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from lowlat.server.admin import LowLatencySwitch
from lowlat.server.answers import Cancelled, ChatChunk, ChatCompletion, Completion, Model, ModelList, SessionEnded
from lowlat.server.decisions import DecisionAnswer, DecisionRequest
from lowlat.server.errors import ErrorBody
from lowlat.server.health import HealthReply
from lowlat.server.info import Info
from lowlat.server.messages_answers import MessagesAnswer, MessagesEvent, TokenCount
from lowlat.server.messages_requests import CountTokensRequest, MessagesRequest
from lowlat.server.requests import ChatRequest, CompletionRequest
from lowlat.server.rerank import RerankAnswer, RerankRequest
from lowlat.server.responses_answers import ResponsesAnswer, ResponsesEvent
from lowlat.server.responses_requests import ResponsesRequest
from lowlat.server.score_requests import ScoreAnswer, ScoreRequest
from lowlat.server.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from lowlat_plugin import Report

_BODIES: dict[str, type] = {
    "create_completion": CompletionRequest,
    "create_chat_completion": ChatRequest,
    "create_response": ResponsesRequest,
    "create_message": MessagesRequest,
    "count_tokens": CountTokensRequest,
    "tokenize": TokenizeRequest,
    "create_score": ScoreRequest,
    "rerank": RerankRequest,
    "decide": DecisionRequest,
    "detokenize": DetokenizeRequest,
    "set_low_latency": LowLatencySwitch,
}
_ANSWERS: dict[str, type] = {
    "create_completion": Completion,
    "create_chat_completion": ChatCompletion,
    "create_response": ResponsesAnswer,
    "create_message": MessagesAnswer,
    "count_tokens": TokenCount,
    "tokenize": Tokenized,
    "create_score": ScoreAnswer,
    "rerank": RerankAnswer,
    "decide": DecisionAnswer,
    "detokenize": Detokenized,
    "list_models": ModelList,
    "get_model": Model,
    "info": Info,
    "cancel_request": Cancelled,
    "end_session": SessionEnded,
    "get_low_latency": Report,
    "set_low_latency": Report,
    "health": HealthReply,
    "ready": HealthReply,
}
_EVENTS: dict[str, type] = {
    "create_completion": Completion,
    "create_chat_completion": ChatChunk,
    "create_response": ResponsesEvent,
    "create_message": MessagesEvent,
}
_REFUSALS = {
    "create_completion": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "create_chat_completion": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "create_score": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "rerank": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "decide": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "create_response": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "create_message": (400, 401, 403, 404, 408, 409, 413, 429, 500, 503),
    "count_tokens": (400, 401, 403, 404, 408, 413, 503),
    "tokenize": (400, 401, 403, 404, 408, 413, 503),
    "detokenize": (400, 401, 403, 404, 408, 413, 503),
    "list_models": (400, 401, 403, 503),
    "info": (400, 401, 403, 503),
    "get_model": (400, 401, 403, 404, 503),
    "cancel_request": (400, 401, 403),
    "end_session": (400, 401, 403, 501, 503),
    "get_low_latency": (400, 401, 403, 501, 503),
    "set_low_latency": (400, 401, 403, 408, 413, 501, 503),
    "metrics": (400, 401, 403),
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of all routes."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    forms = [*_BODIES.values(), *_ANSWERS.values(), *_EVENTS.values(), ErrorBody]
    references, components = msgspec.json.schema_components(forms, ref_template="#/components/schemas/{name}")
    reference = dict(zip(forms, references, strict=True))
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    document["components"]["schemas"].pop("HTTPValidationError", None)
    document["components"]["schemas"].pop("ValidationError", None)
    for path in document["paths"].values():
        for operation in path.values():
            _complete(operation, reference)
    return document


def _complete(operation: dict[str, Any], reference: dict[type, dict[str, Any]]) -> None:
    name = operation["operationId"]
    responses = operation["responses"]
    responses.pop("422", None)
    if name in _BODIES:
        operation["requestBody"] = {"required": True, "content": _json(reference[_BODIES[name]])}
    if name in _ANSWERS:
        responses["200"]["content"] = _json(reference[_ANSWERS[name]])
        if name in _EVENTS:
            chunk = reference[_EVENTS[name]]
            responses["200"]["content"]["text/event-stream"] = {"schema": _event(chunk, reference[ErrorBody])}
    if name in ("health", "ready"):
        responses["503"] = {"description": "Not now", "content": _json(reference[HealthReply])}
        responses["400"] = {"description": "Refused", "content": _json(reference[ErrorBody])}
        responses["403"] = {"description": "Refused", "content": _json(reference[ErrorBody])}
    if name == "metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    for status in _REFUSALS.get(name, ()):
        responses[str(status)] = {"description": "Refused", "content": _json(reference[ErrorBody])}


def _event(*contents: dict[str, Any]) -> dict[str, Any]:
    """A server-sent event. Before OpenAPI 3.2, the schema of such a stream describes each event."""
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": list(contents)}}
    return {
        "type": "object",
        "description": "One event of the stream: a chunk, an error (which ends it), or [DONE] as the last.",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json]}},
        "required": ["data"],
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
