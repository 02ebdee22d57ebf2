"""Asks the engine whether a grammar can be followed, before a request that brings one is queued."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from lowlat.engine.client import EngineClient, EngineUnavailableError
from lowlat.grammars.grammar import Grammar, GrammarError, check_installed
from lowlat.server.errors import ApiError, bad_field, unavailable

_REMEMBERED = 1024
_WAIT_S = 120.0
"""For a grammar's turn and its compilation. Its own limits end it long before, unless many come at once."""


class GrammarDoor:
    """Remembers which grammars the engine has accepted, so that only new ones cost a round trip."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar, field: str) -> None:
        """Returns when the grammar has compiled; streams go on meanwhile.

        Raises:
            ApiError: 400 naming `field`; 429, too many grammars are waiting; 503, the engine is not there.
        """
        limit = self._engine.config.grammar_bytes
        try:
            text = f"{grammar.kind}:{grammar.text}".encode()
        except UnicodeEncodeError:
            raise bad_field(field, "holds half of a surrogate pair, which is no character") from None
        size = len(text) - len(grammar.kind) - 1
        if size > limit:
            raise bad_field(field, f"{size} bytes are more than this server's limit of {limit} (--grammar-bytes)")
        key = hashlib.blake2b(text, digest_size=16).digest()
        if key in self._accepted:
            self._accepted.move_to_end(key)
            return
        try:
            check_installed()
        except GrammarError as error:
            raise bad_field(field, str(error), code="unsupported") from None
        try:
            reply = await self._engine.call("grammar", {"kind": grammar.kind, "text": grammar.text}, _WAIT_S)
        except (EngineUnavailableError, TimeoutError) as error:
            raise unavailable(str(error) or "the engine did not answer in time") from None
        except RuntimeError as error:
            raise bad_field(field, str(error), code="unsupported") from None
        if reply.get("busy"):
            raise ApiError(
                429, f"{field}: {reply['error']}", type="rate_limit_error", code="grammars_busy", retry_after=1
            )
        if reply.get("error") is not None:
            raise bad_field(field, str(reply["error"]), code="invalid_grammar")
        self._accepted[key] = None
        while len(self._accepted) > _REMEMBERED:
            self._accepted.popitem(last=False)
