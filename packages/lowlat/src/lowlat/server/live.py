"""What the server keeps of every request under way, whichever route it came by."""

from __future__ import annotations

from typing import Protocol

from lowlat.server.answers import Timings, Usage


class LiveRequest(Protocol):
    """A request from admission to its last byte."""

    @property
    def public_id(self) -> str:
        """The id that its client knows."""

    @property
    def sequences(self) -> int:
        """Sequences of the engine that it may have open at a time."""

    @property
    def finish_reasons(self) -> list[str]:
        """Per choice, or per sequence; `abort` for one that has not ended."""

    def cancel(self) -> None:
        """End what still runs."""

    def usage(self) -> Usage:
        """Tokens of the whole request."""

    def timings(self) -> Timings:
        """Seen from the server."""
