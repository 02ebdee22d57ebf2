"""The prompt's part of an answer: its text where it is echoed, and the log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from lowlat.engine.request import TokenLogprobs
from lowlat.text.detokenizer import StreamingDetokenizer
from lowlat.text.output import Delta, TokenLogprob, TopLogprob, finite_logprob
from lowlat.text.tokenizer import Tokenizer

NO_LOGPROB = math.nan
"""Of the first prompt token, which nothing precedes; `null` in answers."""


class PromptLogprob(msgspec.Struct):
    """One candidate for a place in the prompt."""

    logprob: float
    rank: int
    """1: the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, null for the first: candidates by token id, the prompt's own token among them."""


class PromptPart:
    """Collects what the engine says about one prompt.

    `echo_logprobs`: alternatives that an echo shows (None: no log-probabilities); `table_logprobs`: those of a table
    that the client asked for by itself.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        *,
        echo: bool,
        echo_logprobs: int | None,
        table_logprobs: int | None,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._echo_logprobs = echo_logprobs
        self._table_logprobs = table_logprobs
        self._scores: list[TokenLogprobs] = []
        self._offsets: list[int] = []
        self.text = self._read(skip_special_tokens) if echo else ""
        """What an echo sends; empty without one."""

    def _read(self, skip_special_tokens: bool) -> str:
        detokenizer = StreamingDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        text = ""
        for id in self._ids:
            self._offsets.append(len(text))
            text += detokenizer.push(id)
        return text + detokenizer.finish()

    def take(self, scores: list[TokenLogprobs]) -> None:
        """Scores of the next prompt tokens, from the second token on."""
        self._scores += scores

    def echo(self) -> Delta:
        """Text and log-probabilities of the prompt, to be put before the answer's first delta; no answer tokens."""
        entries: list[TokenLogprob] | None = None
        if self._echo_logprobs is not None:
            scores = [TokenLogprobs(NO_LOGPROB, 0, [], []), *self._scores]
            # After an abort there may be fewer scores than tokens.
            entries = [
                self._entry(id, score, offset)
                for id, score, offset in zip(self._ids, scores, self._offsets, strict=False)
            ]
        return Delta(self.text, [], entries, 0)

    def _entry(self, id: int, score: TokenLogprobs, offset: int) -> TokenLogprob:
        name, data = self._tokenizer.token_text, self._tokenizer.token_bytes
        count = self._echo_logprobs or 0
        top = [
            TopLogprob(other, finite_logprob(value), name(other), data(other))
            for other, value in zip(score.top_ids[:count], score.top_logprobs[:count], strict=True)
        ]
        logprob = score.logprob if math.isnan(score.logprob) else finite_logprob(score.logprob)
        return TokenLogprob(id, logprob, name(id), data(id), offset, top)

    def table(self) -> PromptLogprobs | None:
        """The table of `prompt_logprobs`; None where it was not asked for."""
        count = self._table_logprobs
        if count is None:
            return None
        table: PromptLogprobs = [None]
        name = self._tokenizer.token_text
        for id, score in zip(self._ids[1:], self._scores, strict=False):
            candidates = {
                str(other): PromptLogprob(finite_logprob(value), place + 1, name(other))
                for place, (other, value) in enumerate(
                    zip(score.top_ids[:count], score.top_logprobs[:count], strict=True)
                )
            }
            candidates[str(id)] = PromptLogprob(finite_logprob(score.logprob), score.rank, name(id))
            table.append(candidates)
        return table
