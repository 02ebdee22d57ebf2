"""A live server over the simulated engine, and what an answer must be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kv_simulator import make_request, solo_answer
from server_kit import PATIENCE_S, Live, live_server, wait_for

from lowlat.engine.config import EngineConfig

PROGRAM = (sys.executable, str(Path(__file__).with_name("simulated_engine.py")))


@contextlib.contextmanager
def simulated_server(
    shape: dict[str, Any] | None = None, *, max_batch: int = 8, watchdog_s: float = PATIENCE_S, **settings: Any
) -> Iterator[Live]:
    """`shape`: fields of simulated_engine.Shape; `settings`: what `live_server` takes."""
    config = EngineConfig(model="fake-model", max_batch=max_batch, watchdog_s=watchdog_s)
    with live_server(shape, config=config, program=PROGRAM, **settings) as live:
        yield live


def solo(prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    """Token ids that the simulated engine answers when nothing else runs."""
    return solo_answer(make_request("solo", prompt, max_tokens, **fields))


def at_rest(live: Live) -> Any:
    """Wait until nothing runs; then every page is free or cached."""

    def resting() -> bool:
        stats = live.state.engine.stats
        nothing = stats.running == stats.waiting == stats.pages_held == 0 == len(live.state.live)
        return nothing and stats.pages_free + stats.pages_cached == stats.pages_total

    return wait_for(resting)
