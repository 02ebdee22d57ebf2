"""Scores from an engine in a process of its own, for asyncio."""

from __future__ import annotations

import itertools
from typing import Any

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.engine.config import EngineConfig
from lowlat.engine.messages import Ready
from lowlat.engine.request import FinishReason
from lowlat.engine.score_waves import Readings, ScoreWaves
from lowlat.engine.scoring import Preference, ScoreInput, ScoreLimits, choose_mode, plan_score

_numbers = itertools.count()


def score_limits(config: EngineConfig, ready: Ready) -> ScoreLimits:
    """What an engine can take of scores."""
    return ScoreLimits(
        max_context=ready.max_context,
        max_batch=config.max_batch,
        page_size=ready.page_size,
        chunk_tokens=config.chunk_tokens,
        item_tokens=ready.item_tokens,
    )


async def async_score(
    client: EngineClient, asked: ScoreInput, preferred: Preference = "auto", **fields: Any
) -> Readings:
    """Log-probabilities of labels behind a query and items; `fields`: see `request_of`.

    Raises:
        EngineUnavailableError: the engine is not ready, or fails meanwhile.
    """
    limits = score_limits(client.config, await client.wait_ready(0))
    plan = plan_score(asked, choose_mode(asked, limits, preferred), limits)
    waves = ScoreWaves(plan, f"score-{next(_numbers)}", len(asked.items), **fields)
    try:
        while requests := waves.next_wave():
            async for output in client.submit(*requests):
                waves.take(output)
                if output.finish_reason not in (None, FinishReason.LENGTH):
                    raise EngineUnavailableError(output.error or "the score was cancelled")
    finally:
        for id in list(waves.open):
            client.abort(id)
    return waves.readings
