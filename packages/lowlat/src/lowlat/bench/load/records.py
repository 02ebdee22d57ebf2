"""What a client noted about one request. Times are seconds of `time.perf_counter`."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """One request as a client saw it. Derived times are None where the request did not get that far."""

    name: str = ""
    user: int = 0
    due: float | None = None
    """When an open loop wanted to send it; `sent - due` shows a client that lagged."""
    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    content_times: list[float] = []
    """One entry for each chunk that carried text; with speculation a chunk may hold several tokens."""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    counted_chunks: bool = False
    """The server sent no usage: `output_tokens` counts chunks."""
    finish_reason: str | None = None
    error: str | None = None
    wanted_tokens: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the request ended well and brought at least one token."""
        return self.error is None and bool(self.content_times) and bool(self.output_tokens)

    @property
    def beyond_context(self) -> bool:
        """Whether the server refused the request because it does not fit the model's context."""
        text = (self.error or "").lower()
        return self.status in (400, 413, 422) and any(
            phrase in text for phrase in ("context", "too long", "too many tokens", "maximum length", "max_model_len")
        )

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first text."""
        return self.content_times[0] - self.sent

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the last text."""
        return self.content_times[-1] - self.sent

    @property
    def gap_s(self) -> float | None:
        """Mean seconds between tokens after the first; None for a single token."""
        if not self.output_tokens or self.output_tokens < 2 or len(self.content_times) < 2:
            return None
        return (self.content_times[-1] - self.content_times[0]) / (self.output_tokens - 1)
