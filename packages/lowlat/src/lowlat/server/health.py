"""Probes and metrics: `/health` (alive), `/ready` (takes requests), `/metrics` (Prometheus)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from lowlat.server.metrics import ServerCollector
from lowlat.server.replies import json_reply
from lowlat.server.routes import state_of

router = APIRouter()
metrics_router = APIRouter()


class HealthReply(msgspec.Struct, kw_only=True):
    status: str
    """`ok`, `starting`, `restarting`, `draining` or `unhealthy`."""
    error: str | None
    restarts: int
    heartbeat_age_s: float | None
    progress_age_s: float | None


def _reply(request: Request) -> tuple[HealthReply, bool, bool]:
    state = state_of(request)
    health = state.engine.health()
    status = "ok" if health.ready else str(health.state) if health.alive else "unhealthy"
    if state.draining:
        status = "draining"
    reply = HealthReply(
        status=status,
        error=health.error,
        restarts=health.restarts,
        heartbeat_age_s=health.heartbeat_age_s,
        progress_age_s=health.progress_age_s,
    )
    return reply, health.alive, health.ready and not state.draining


@router.get("/health", operation_id="health", summary="Whether the server is alive")
async def health(request: Request) -> Response:
    """200 while the engine lives (also while it loads), 503 when it hangs or is gone."""
    reply, alive, _ = _reply(request)
    return json_reply(reply, 200 if alive else 503)


@router.get("/ready", operation_id="ready", summary="Whether the server takes requests")
async def ready(request: Request) -> Response:
    """200 once weights are loaded and a step has run; 503 before that, while draining, and when unhealthy."""
    reply, _, takes_requests = _reply(request)
    return json_reply(reply, 200 if takes_requests else 503)


@metrics_router.get("/metrics", operation_id="metrics", summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    registry = CollectorRegistry()
    registry.register(ServerCollector(state.engine, state.metrics, state.live))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
