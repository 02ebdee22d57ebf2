"""Whether an engine process is well: how long it may be silent, and how long a step may take."""

from __future__ import annotations

import enum

import msgspec


class EngineState(enum.StrEnum):
    """Where an engine process stands, seen from the front. FAILED and CLOSED are ends."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe wants to know. Ages are in seconds."""

    alive: bool
    """The engine process lives and speaks (or is being started)."""
    ready: bool
    """Weights are loaded, a step has run, and the engine is alive."""
    state: EngineState
    heartbeat_age_s: float | None
    progress_age_s: float | None
    """Seconds since a step finished or nothing was there to do."""
    restarts: int
    error: str | None


class Pulse(msgspec.Struct):
    """Signs of life of a started engine, in seconds of `time.monotonic()`."""

    heard_at: float
    """When it last said anything."""
    progress_at: float
    """When a step last finished, or nothing was there to do."""

    def hang(self, now: float, limit_s: float) -> str | None:
        """Why the engine must be ended: `limit_s` seconds of silence, or without a finished step; None: it need not."""
        if now - self.heard_at > limit_s:
            return f"the engine was silent for {limit_s:g} s and was ended"
        if now - self.progress_at > limit_s:
            return f"the engine finished no step for {limit_s:g} s with requests running and was ended"
        return None

    def health(
        self, now: float, state: EngineState, silence_s: float, stuck_s: float, *, restarts: int, failure: str | None
    ) -> Health:
        """What a probe sees. `silence_s`, `stuck_s`: seconds from which silence, and a step, make it unhealthy."""
        started = state in (EngineState.READY, EngineState.STARTING, EngineState.RESTARTING)
        heard = now - self.heard_at if state is EngineState.READY else None
        progress = now - self.progress_at if state is EngineState.READY else None
        silent = heard is not None and heard > silence_s
        stuck = progress is not None and progress > stuck_s
        error = failure
        if silent and heard is not None:
            error = f"no word from the engine for {heard:.1f} s"
        elif stuck and progress is not None:
            error = f"no step finished for {progress:.1f} s with requests running"
        alive = started and not silent and not stuck
        return Health(
            alive=alive,
            ready=alive and state is EngineState.READY,
            state=state,
            heartbeat_age_s=heard,
            progress_age_s=progress,
            restarts=restarts,
            error=error,
        )
