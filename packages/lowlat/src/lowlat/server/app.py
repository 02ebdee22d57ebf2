"""The ASGI application: routes and error forms."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lowlat.server import (
    admin,
    cancel,
    chat,
    completions,
    decisions,
    health,
    info,
    messages_route,
    models,
    rerank,
    responses_route,
    score,
    sessions,
    tokenize,
)
from lowlat.server.errors import ApiError, unexpected
from lowlat.server.gate import Gate
from lowlat.server.openapi import describe
from lowlat.server.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """What clients use; with `/metrics` and the admin routes too, unless these have a port of their own."""
    families = [
        completions.router,
        chat.router,
        responses_route.router,
        messages_route.router,
        tokenize.router,
        score.router,
        rerank.router,
        decisions.router,
        models.router,
        info.router,
        cancel.router,
        sessions.router,
        health.router,
    ]
    if state.settings.admin_port is None:
        families += _ADMIN
    return _application(state, families)


def create_admin_app(state: ServerState) -> ASGIApp:
    """What operators use: probes, `/metrics` and the admin routes. The same keys hold."""
    return _application(state, [health.router, *_ADMIN])


_ADMIN = [health.metrics_router, admin.router]


def _application(state: ServerState, families: list[APIRouter]) -> ASGIApp:
    # The documentation pages would load scripts from another site; the description itself is at /openapi.json.
    app = FastAPI(title="lowlat", version=_version(), docs_url=None, redoc_url=None)
    app.state.server = state
    for family in families:
        app.include_router(family)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    description: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not description:
            description.update(describe(app))
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return Gate(app, state)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _unexpected(_: Request, __: Exception) -> Response:
    return unexpected().response()  # the gate logs it


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is nothing at {request.url.path[:200]}; GET /openapi.json names every route",
        405: f"{request.method} is not allowed at {request.url.path[:200]}",
    }
    found = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    found.headers.update({name.lower(): value for name, value in (error.headers or {}).items()})
    if error.status_code == 405:
        found.headers["allow"] = ", ".join(sorted(_methods_at(request)))
    return found.response()


def _methods_at(request: Request) -> set[str]:
    """All methods of a path; the framework names those of one of its routes only."""
    found: set[str] = set()
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", template), request.url.path):
            found |= {method.upper() for method in operations}
    return found


def _version() -> str:
    try:
        return version("lowlat")
    except PackageNotFoundError:
        return "0"
