"""Small JSON answers."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_reply(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
