"""`/v1/admin/low-latency`: whether kernels compute decode steps, why not, and a switch that needs no restart."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

import lowlat_plugin
from lowlat.server.bodies import read_body
from lowlat.server.errors import bad_field
from lowlat.server.replies import json_reply
from lowlat.server.routes import call_engine, state_of

router = APIRouter()


class LowLatencySwitch(msgspec.Struct, forbid_unknown_fields=True):
    on: bool
    """false: every step takes the general path from the next one on; true: kernels again where they cover."""


@router.get("/v1/admin/low-latency", operation_id="get_low_latency", summary="Which steps kernels compute, and why")
async def get_low_latency(request: Request) -> Response:
    return await _ask(request, {})


@router.post("/v1/admin/low-latency", operation_id="set_low_latency", summary="Switch kernels off or on")
async def set_low_latency(request: Request) -> Response:
    """Takes effect between two steps, on all ranks at the same one; requests under way go on."""
    settings = state_of(request).settings
    data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
    try:
        wanted = msgspec.json.decode(data, type=LowLatencySwitch)
    except msgspec.DecodeError as error:
        raise bad_field("on", f'send {{"on": true}} or {{"on": false}}; {error}') from None
    return await _ask(request, {"on": wanted.on})


async def _ask(request: Request, arguments: dict[str, str | int | float | bool | None]) -> Response:
    answer = await call_engine(request, "low-latency", arguments)
    return json_reply(msgspec.json.decode(str(answer["report"]), type=lowlat_plugin.Report))
