"""Times between an answer's tokens, from when its steps arrived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def token_gaps(arrivals: Iterable[tuple[float, int]], tokens: int) -> list[float]:
    """Seconds before each of the answer's tokens but the first.

    Args:
        arrivals: (time, tokens) of what came, in order. Tokens that one step brought have no gap between them.
        tokens: of the answer; what came behind its end is left out.
    """
    gaps: list[float] = []
    before: float | None = None
    for at, count in arrivals:
        kept = min(count, tokens)
        if kept < 1:
            break
        if before is not None:
            gaps.append(at - before)
        gaps += [0.0] * (kept - 1)
        before, tokens = at, tokens - kept
    return gaps


def mean_and_p90_ms(gaps: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and 90th percentile (nearest rank) of gaps in seconds, in milliseconds; None where there is no gap."""
    if not gaps:
        return None, None
    place = max(0, -(-len(gaps) * 9 // 10) - 1)
    return 1e3 * sum(gaps) / len(gaps), 1e3 * sorted(gaps)[place]
