"""`DELETE /v1/sessions/{id}`: an agent is done, and its prefix need not stay cached for it.

Idempotent, as cancelling a request is. Requests of the session that still run go on, and pin nothing when they end.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from lowlat.server.answers import SessionEnded
from lowlat.server.errors import bad_field
from lowlat.server.replies import json_reply
from lowlat.server.requests import CacheSalt, RequestId
from lowlat.server.routes import call_engine

router = APIRouter()


@router.delete("/v1/sessions/{session_id}", operation_id="end_session", summary="Give back what a session pins")
async def end_session(session_id: str, request: Request, cache_salt: str = "") -> Response:
    """`cache_salt` is that of the session's requests: salts keep sessions of the same id apart."""
    for name, value, form in (("session_id", session_id, RequestId), ("cache_salt", cache_salt, CacheSalt)):
        try:
            msgspec.convert(value, form)
        except msgspec.ValidationError as error:
            raise bad_field(name, str(error).replace("`", "")) from None
    answer = await call_engine(request, "end-session", {"id": session_id, "salt": cache_salt})
    return json_reply(SessionEnded(id=session_id, ended=bool(answer["ended"])))
