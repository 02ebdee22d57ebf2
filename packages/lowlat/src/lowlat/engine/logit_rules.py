"""Rules of one request that change logits before a token is chosen: bias, penalties, tokens that must not come yet."""

from __future__ import annotations

from collections import Counter

import torch

from lowlat.engine.batch import SlotSampling


class LogitRules:
    """The rules of one slot, and the tokens that they have seen.

    Legend: V vocabulary, T tokens seen, each once.
    """

    def __init__(self, setting: SlotSampling) -> None:
        self._setting = setting
        self._bias_ids = torch.tensor([token for token, _ in setting.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in setting.logit_bias], dtype=torch.float32)
        self._banned = torch.tensor(setting.banned, dtype=torch.int64)
        self._answer = Counter(setting.answer)
        self._prompt = frozenset(setting.prompt)
        self._prompt_T = torch.tensor(sorted(self._prompt), dtype=torch.int64)

    @classmethod
    def of(cls, setting: SlotSampling) -> LogitRules | None:
        """The rules of a setting; None when it has none, which costs nothing in a step."""
        penalties = setting.presence_penalty or setting.frequency_penalty or setting.repetition_penalty != 1.0
        return cls(setting) if penalties or setting.logit_bias or setting.banned else None

    def observe(self, token: int) -> None:
        """Take note of a token of the answer."""
        self._answer[token] += 1

    def apply(self, logits_V: torch.Tensor, position: int) -> torch.Tensor:
        """Logits by the rules, for the token at `position`; `logits_V` stays as it is."""
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
        if position < setting.banned_until:
            logits_V[self._banned] = float("-inf")
        return logits_V
