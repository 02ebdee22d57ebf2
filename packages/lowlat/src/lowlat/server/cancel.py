"""`DELETE /v1/requests/{id}`: end a request that runs.

Idempotent: the request with this id does not run afterwards, whatever was before, and the answer is always 200;
`cancelled` says whether it was this call that ended it. The cancelled request's own answer ends with finish reason
`abort` and the text so far.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lowlat.server.answers import Cancelled
from lowlat.server.replies import json_reply
from lowlat.server.routes import state_of

router = APIRouter()


@router.delete("/v1/requests/{request_id}", operation_id="cancel_request", summary="Cancel a request that runs")
async def cancel_request(request_id: str, request: Request) -> Response:
    """`request_id` is the `X-Request-Id` of the answer, or the answer's `id` with its prefix (`cmpl-`, `chatcmpl-`)."""
    live = state_of(request)
    known = request_id
    for prefix in ("chatcmpl-", "cmpl-", "score-", "rerank-", "decisions-"):
        if known not in live.live and known.startswith(prefix):
            known = known.removeprefix(prefix)
    return json_reply(Cancelled(id=request_id, cancelled=live.cancel(known)))
