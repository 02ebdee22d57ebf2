"""What a server may be told, apart from the engine's own settings."""

from __future__ import annotations

import msgspec

from lowlat.engine.scoring import Preference


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and addresses of the front. Every limit is documented in docs/http-api.md."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_port: int | None = None
    """Port of `/metrics` and the admin routes, on `admin_host`; None: they are on the public port."""
    admin_host: str = "127.0.0.1"
    served_model_name: str | None = None
    """Name in `/v1/models` and in answers; None: the value of `--model`."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a request must bring one as `Authorization: Bearer KEY`; empty: none needed."""
    max_queue: int = 256
    """Sequences (choices, not HTTP requests) that may wait beyond those that run; more get a 429."""
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 30.0
    """Seconds within which a request's body must have arrived."""
    max_n: int = 16
    """Most choices (`n`) of a prompt."""
    max_prompts: int = 64
    """Most prompts in one completion request."""
    max_score_items: int = 4096
    """Most items in one scoring request."""
    score_mode: Preference = "auto"
    """How requests are scored that leave it open: `sis`, `mis` where possible, or `auto`, the cheaper one."""
    start_wait_s: float = 30.0
    """Seconds that a request waits for an engine that is starting or restarting, before a 503."""
    drain_s: float = 30.0
    """Seconds that open requests get to finish after SIGTERM."""
    max_connections: int = 4096
    heartbeat_timeout_s: float = 5.0
    """Seconds without a word from the engine after which the server is unhealthy."""
    log_format: str = "auto"
    """`json`, `text`, or `auto`: text on a terminal, else JSON lines."""
