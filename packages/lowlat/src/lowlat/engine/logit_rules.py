"""Rules of one request that change logits before a token is chosen: bias, penalties, tokens that must not come yet, and
those that its grammar allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from lowlat.engine.batch import SlotSampling
from lowlat.grammars.matcher import AnswerOverError, Matcher


class LogitRules:
    """The rules of one slot, and the tokens that they have seen.

    Legend: V vocabulary, T tokens seen, each once.
    """

    def __init__(self, setting: SlotSampling, slot: int = 0) -> None:
        """`slot`: the batch slot, by which a grammar's process knows the request."""
        self._setting = setting
        self._bias_ids = torch.tensor([token for token, _ in setting.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in setting.logit_bias], dtype=torch.float32)
        self._banned = torch.tensor(setting.banned, dtype=torch.int64)
        self._answer = Counter(setting.answer)
        self._prompt = frozenset(setting.prompt)
        self._ends = torch.tensor(setting.grammar.ends if setting.grammar else (), dtype=torch.int64)
        self._matcher = Matcher(setting.grammar, slot, setting.answer) if setting.grammar is not None else None
        self.over: AnswerOverError | None = None
        """Set when the grammar lets no token come next: the answer is over, or cannot go on."""
        self._prompt_T = torch.tensor(sorted(self._prompt), dtype=torch.int64)

    @staticmethod
    def has(setting: SlotSampling) -> bool:
        """Whether a setting has rules."""
        return setting.has_rules

    @classmethod
    def of(cls, setting: SlotSampling, slot: int = 0) -> LogitRules | None:
        """The rules of a setting; None when it has none, which costs nothing in a step."""
        return cls(setting, slot) if cls.has(setting) else None

    @property
    def answer(self) -> Mapping[int, int]:
        """How often the answer holds each token."""
        return self._answer

    def observe(self, token: int) -> None:
        """Take note of a token of the answer."""
        self._answer[token] += 1
        if self._matcher is not None:
            self._matcher.advance(token)

    def apply(self, logits_V: torch.Tensor, position: int) -> torch.Tensor:
        """Logits by the rules, for the token at `position`; `logits_V` stays as it is.

        Raises `AnswerOverError` when the grammar lets no token come, also noted in `over`.
        """
        setting = self._setting
        logits_V = logits_V.clone()
        if len(self._bias_ids):
            logits_V.index_add_(0, self._bias_ids, self._bias)
        answer_T = torch.tensor(list(self._answer), dtype=torch.int64)
        if setting.repetition_penalty != 1.0:
            new = [token for token in self._answer if token not in self._prompt]
            seen_T = torch.cat((self._prompt_T, torch.tensor(new, dtype=torch.int64)))
            logits_T = logits_V[seen_T]
            factor = setting.repetition_penalty
            logits_V[seen_T] = torch.where(logits_T > 0, logits_T / factor, logits_T * factor)
        if setting.presence_penalty or setting.frequency_penalty:
            counts_T = torch.tensor(list(self._answer.values()), dtype=torch.float32)
            logits_V[answer_T] -= setting.frequency_penalty * counts_T + setting.presence_penalty
        early = position < setting.banned_until
        if self._matcher is not None:
            return self._follow(self._matcher, logits_V, early)
        if early:
            logits_V[self._banned] = float("-inf")
        return logits_V

    def _follow(self, matcher: Matcher, logits_V: torch.Tensor, early: bool) -> torch.Tensor:
        """Only what the grammar allows; of that, no banned token and, if so asked, no end, unless nothing is left."""
        if self.over is not None:
            raise self.over
        try:
            allowed_V = matcher.allowed(len(logits_V))
        except AnswerOverError as over:
            self.over = over
            raise
        if allowed_V is None:
            return logits_V
        for active, ids in ((early, self._banned), (self._setting.keep_going, self._ends)):
            if active:
                fewer_V = allowed_V.clone()
                fewer_V[ids] = False
                allowed_V = fewer_V if bool(fewer_V.any()) else allowed_V
        return logits_V.masked_fill_(~allowed_V, float("-inf"))
