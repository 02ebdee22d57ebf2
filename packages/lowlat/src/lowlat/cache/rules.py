"""What a prefill must heed for a model, declared by the model and kept by the scheduler."""

from __future__ import annotations

import msgspec


class PrefillRules(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults ask for nothing: chunks of any size, and state that serves exactly where it was saved.

    Numbers are tokens.
    """

    last_chunk: int = 1
    """Least rows of a prompt's last chunk, unless all that is to compute is shorter."""
    state_reach: int = 0
    """A saved state also serves prefixes that end so many tokens before the place where it was saved."""
    tail: int = 0
    """Bounded replay, decoder side: rows of a chunk that run through all layers; 0: all rows (exact)."""
    replay: int = 0
    """Bounded replay, encoder side: cached tokens that run again where a cached prefix has no state; 0: such a prefix
    is not used (exact)."""
    replay_history: int = 0
    """Tokens before those that the model must be told."""
