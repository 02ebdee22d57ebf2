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
    content_sizes: list[int] = []
    """Characters of each of these chunks."""
    prompt_tokens: int | None = None
    """None where the server says none that can be."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks_because: str = ""
    """Why `output_tokens` counts chunks; empty where it is the server's usage."""
    finish_reason: str | None = None
    error: str | None = None
    wanted_tokens: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the request ended well and brought at least one token."""
        return self.error is None and bool(self.content_times) and bool(self.output_tokens)

    @property
    def short(self) -> bool:
        """Whether the answer has fewer tokens than were asked for."""
        return self.ok and self.wanted_tokens is not None and (self.output_tokens or 0) < self.wanted_tokens

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
    def first_tokens(self) -> int:
        """Tokens that came with the first text: one for each chunk of that moment where every chunk is a token.

        Where chunks hold several, a stream does not say which holds how many: then the first text's share of all
        characters, within what the other chunks leave.
        """
        tokens = self.output_tokens or 0
        at_once = self.content_times.count(self.content_times[0])
        if tokens <= len(self.content_times) or not sum(self.content_sizes):
            return at_once
        share = sum(self.content_sizes[:at_once]) / sum(self.content_sizes)
        return max(at_once, min(round(tokens * share), tokens - (len(self.content_times) - at_once)))

    @property
    def gap_s(self) -> float | None:
        """Mean seconds between tokens: the time after the first text over the tokens after it.

        None where nothing came later than the first text.
        """
        if not self.content_times or self.content_times[-1] <= self.content_times[0]:
            return None
        later = (self.output_tokens or 0) - self.first_tokens
        return (self.content_times[-1] - self.content_times[0]) / later if later > 0 else None
