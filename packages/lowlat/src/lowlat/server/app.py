"""The ASGI application: routes and error forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lowlat.engine.client import EngineClient
from lowlat.server import admin, cancel, chat, completions, health, info, models
from lowlat.server.errors import ApiError, unexpected
from lowlat.server.gate import Gate
from lowlat.server.openapi import describe
from lowlat.server.settings import ServerSettings
from lowlat.server.state import ServerState
from lowlat.server.text_model import TextModel


def create_app(
    settings: ServerSettings, engine: EngineClient, load_text: Callable[[], Awaitable[TextModel]]
) -> tuple[ASGIApp, ServerState]:
    """The application and its state; `load_text` gives the tokenizer. `run.serve_app` gives both their life."""
    state = ServerState(settings, engine, load_text)

    # The documentation pages would load scripts from another site; the description itself is at /openapi.json.
    app = FastAPI(title="lowlat", version=_version(), docs_url=None, redoc_url=None)
    app.state.server = state
    for family in (completions, chat, models, info, cancel, health, admin):
        app.include_router(family.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    description: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not description:
            description.update(describe(app))
        return description

    app.openapi = openapi  # type: ignore[method-assign]
    return Gate(app, state), state


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _unexpected(_: Request, __: Exception) -> Response:
    return unexpected().response()  # the gate logs it


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not allowed at {request.url.path[:200]}",
    }
    found = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    found.headers.update(error.headers or {})
    return found.response()


def _version() -> str:
    try:
        return version("lowlat")
    except PackageNotFoundError:
        return "0"
