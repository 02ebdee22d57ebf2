"""What the engine counts, for `/metrics` and for whoever asks how it fares."""

from __future__ import annotations

from collections import Counter

import msgspec


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent to the front a few times a second and when it becomes idle."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    """Guessed tokens that steps checked, and those that were right."""
    bad_logits: int = 0
    """Requests that ended with an error because their logits were not numbers."""
    sessions: int = 0
    """Sessions that pin a prefix."""
    pages_pinned: int = 0
    """Pages that sessions pin; they count as cached too."""
    session_pins_lost: list[tuple[str, int]] = []
    """(reason, pins that were given up): `expired`, `ended`, `budget` or `pages`."""
    low_latency_steps: list[tuple[str, str, int]] = []
    """(path, reason, steps): path `plugin` or `general`; the reason is `covered` for `plugin`."""
    decode_rows: int = 0
    """Times that a request took part in a step of decodes alone where steps may check guesses, and `decode_tokens`:
    what that brought."""
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    """Time of those steps, and `plain_seconds`: what they would have taken without guesses, by measured step times."""
    plain_seconds: float = 0.0
    window_pages_free: int = 0
    """Pages of layers with a window that hold nothing, keys of a prefix, or what the window of a request may reach."""
    window_pages_cached: int = 0
    window_pages_held: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step brought a request, where steps may check guesses."""
        return self.decode_tokens / self.decode_rows if self.decode_rows else None

    @property
    def break_even(self) -> float | None:
        """Tokens a step above which speculation gains time: how much longer its steps take than plain ones."""
        return self.decode_seconds / self.plain_seconds if self.plain_seconds else None


_COUNTERS = (
    "step",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "aborted",
    "guessed_tokens",
    "accepted_tokens",
    "bad_logits",
    "decode_rows",
    "decode_tokens",
    "decode_seconds",
    "plain_seconds",
)
"""Fields that only grow while an engine lives; so do `session_pins_lost` and `low_latency_steps`, by reason."""


def add_counters(stats: EngineStats, earlier: EngineStats) -> EngineStats:
    """`stats` with the counters of engines before a restart added, so that counters never go back. Gauges stay."""
    steps = Counter({(path, reason): count for path, reason, count in earlier.low_latency_steps})
    steps.update({(path, reason): count for path, reason, count in stats.low_latency_steps})
    lost = Counter(dict(earlier.session_pins_lost))
    lost.update(dict(stats.session_pins_lost))
    return msgspec.structs.replace(
        stats,
        session_pins_lost=list(lost.items()),
        low_latency_steps=[(path, reason, count) for (path, reason), count in steps.items()],
        **{name: getattr(stats, name) + getattr(earlier, name) for name in _COUNTERS},
    )
