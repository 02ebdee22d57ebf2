"""Choosing tokens from logits.

Legend of shape suffixes: M samples of a step, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lowlat.engine.batch import MIN_TEMPERATURE, SlotSampling
from lowlat.engine.host_drawing import draw, token_keys
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.request import TokenLogprobs
from lowlat.grammars.matcher import AnswerOverError

# Filters look at so many of the most likely tokens first, and sort the whole vocabulary only if those are too few.
_FIRST_LOOK = 256


class BadLogitsError(Exception):
    """A step's logits are not numbers."""


def sample(
    logits_MV: torch.Tensor,
    settings: list[SlotSampling],
    positions: list[int],
    rules: list[LogitRules | None] | None = None,
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Choose a token for each row of float32 `logits_MV`.

    `positions` are the places of the chosen tokens in their sequences: the random number of a token depends on its
    request's seed and its position alone, never on what shares the batch. `rules` change the rows of those that have
    some, and take note of the chosen tokens.

    Returns tokens, and log-probabilities where any row asked for them. Raises `BadLogitsError` for NaN.
    """
    bursts, logprobs = sample_bursts(logits_MV, settings, positions, rules, [[]] * len(settings))
    over = [rule is not None and rule.over is not None for rule in rules or [None] * len(bursts)]
    if not all(burst or ended for burst, ended in zip(bursts, over, strict=True)):
        raise BadLogitsError("a step's logits contain NaN: the weights or a kernel are broken")
    return [token for burst in bursts for token in burst], logprobs


def sample_bursts(
    logits_MV: torch.Tensor,
    settings: list[SlotSampling],
    positions: list[int],
    rules: list[LogitRules | None] | None,
    guesses: list[list[int]],
) -> tuple[list[list[int]], list[TokenLogprobs | None] | None]:
    """Choose tokens of each request from its rows, which are one more than its `guesses`.

    Row i of a request is right only if its guesses before i were. So tokens are chosen row by row, as if alone, until
    one differs from the guess: that token still counts, the rows after it do not. Each token is drawn from the model's
    own distribution with its own random number, so answers are those of one row a step, whatever was guessed.

    Where the grammar of a request lets no token come, its tokens end there, and there may be none. A request that would
    need a row with NaN, or with no finite logit, gets no token at all.

    Returns the tokens of each request, and one entry a token where any request asked for log-probabilities.
    """
    # NumPy's search is many times as fast as PyTorch's; NaN counts as the largest in both.
    logits = logits_MV.numpy()
    tokens_M = logits.argmax(-1)
    usable = np.isfinite(logits[np.arange(len(logits)), tokens_M]).tolist()
    likeliest: list[int] = tokens_M.tolist()
    bursts: list[list[int]] = []
    entries: list[TokenLogprobs | None] = []
    first = 0
    for index, (setting, position, guessed) in enumerate(zip(settings, positions, guesses, strict=True)):
        rule = rules[index] if rules else None
        burst: list[int] = []
        before = len(entries)
        for row in range(first, first + len(guessed) + 1):
            if not usable[row]:
                burst = []
                del entries[before:]
                break
            try:
                token = _choose(logits_MV[row], likeliest[row], setting, position + len(burst), rule)
            except AnswerOverError:  # the rule knows why
                break
            entries.append(token_logprobs(logits_MV[row], token, setting.logprobs) if setting.logprobs >= 0 else None)
            burst.append(token)
            if row - first < len(guessed) and token != guessed[row - first]:
                break
        bursts.append(burst)
        first += len(guessed) + 1
    return bursts, entries if any(entry is not None for entry in entries) else None


def simulated_bursts(
    logits_MV: torch.Tensor,
    settings: list[SlotSampling],
    positions: list[int],
    rules: list[LogitRules | None] | None,
    guesses: list[list[int]],
    counts: list[int],
) -> tuple[list[list[int]], list[TokenLogprobs | None] | None]:
    """As `sample_bursts`, but so many tokens of each request as `counts` says, its guesses taken for right.

    For benchmarks of speed at a given acceptance: the answers mean nothing.
    """
    rows = [len(guessed) + 1 for guessed in guesses]
    firsts = [sum(rows[:index]) for index in range(len(rows))]
    last = torch.tensor([first + count - 1 for first, count in zip(firsts, counts, strict=True)])
    places = [position + count - 1 for position, count in zip(positions, counts, strict=True)]
    ends, _ = sample_bursts(logits_MV[last], settings, places, rules, [[]] * len(settings))
    bursts = [[*guessed[: count - 1], *end] for guessed, count, end in zip(guesses, counts, ends, strict=True)]
    entries = [
        token_logprobs(logits_MV[first + row], token, setting.logprobs) if setting.logprobs >= 0 else None
        for first, burst, setting in zip(firsts, bursts, settings, strict=True)
        for row, token in enumerate(burst)
    ]
    return bursts, entries if any(entry is not None for entry in entries) else None


def draw_guess(
    logits_V: torch.Tensor,
    setting: SlotSampling,
    position: int,
    keys_V: np.ndarray | None = None,
    sharpness: float = 1.0,
) -> int:
    """A draft's guess of the token at `position`, its place in `logits_V`: drawn from the draft's distribution with the
    noise that the target's token will be drawn with, so the more alike the two are, the more often they are the same.

    `keys_V`: `host_drawing.token_keys` of what the logits stand for, where not for all tokens. `sharpness`: a factor on
    the logits.
    """
    if setting.temperature < MIN_TEMPERATURE:
        return int(logits_V.numpy().argmax())
    return _draw(logits_V, setting, position, keys_V, sharpness)


def _choose(
    logits_V: torch.Tensor, likeliest: int, setting: SlotSampling, position: int, rule: LogitRules | None
) -> int:
    token = likeliest
    if rule is not None:
        logits_V = rule.apply(logits_V, position)
    if setting.temperature >= MIN_TEMPERATURE:
        token = _draw(logits_V, setting, position)
    elif rule is not None:
        token = int(logits_V.argmax())
    if rule is not None:
        rule.observe(token)
    return token


def _draw(
    logits_V: torch.Tensor,
    setting: SlotSampling,
    position: int,
    keys_V: np.ndarray | None = None,
    sharpness: float = 1.0,
) -> int:
    """The token with the largest sum of logit over temperature and noise, of those that top-k, top-p and min-p keep."""
    # The temperature as devices have it.
    temperature = float(np.float32(setting.temperature))
    kept = _kept(logits_V, setting, temperature)
    if kept is None:
        return draw(logits_V, sharpness, temperature, setting.seed, position, keys_V)
    kept_V = kept.numpy()
    keys_V = token_keys(kept_V) if keys_V is None else keys_V[kept_V]
    return int(kept_V[draw(logits_V[kept], sharpness, temperature, setting.seed, position, keys_V)])


def _kept(logits_V: torch.Tensor, setting: SlotSampling, temperature: float) -> torch.Tensor | None:
    """The tokens that top-k, top-p and min-p keep, most likely first; None: all."""
    if setting.top_k <= 0 and setting.top_p >= 1.0 and setting.min_p <= 0.0:
        return None
    scaled_V = (logits_V - logits_V.max()).div_(temperature)
    if setting.top_k > 0:
        scaled, ids = scaled_V.topk(min(setting.top_k, len(scaled_V)))
        probabilities = scaled.softmax(-1, dtype=torch.float64)
    else:
        probabilities, ids = _head_of(scaled_V.softmax(-1, dtype=torch.float64), setting)
    count = len(ids)
    if setting.top_p < 1.0:
        # The fewest most likely tokens whose mass reaches top_p; at least one.
        count = min(count, int(torch.searchsorted(probabilities.cumsum(-1), setting.top_p)) + 1)
    if setting.min_p > 0.0:
        count = max(1, int((probabilities[:count] >= setting.min_p * probabilities[0]).sum()))
    return ids[:count]


def _head_of(probabilities_V: torch.Tensor, setting: SlotSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Most likely tokens, best first, enough for top-p and min-p to end within: their probabilities and ids."""
    head, ids = probabilities_V.topk(min(_FIRST_LOOK, len(probabilities_V)))
    if float(head.sum()) >= setting.top_p or float(head[-1]) < setting.min_p * float(head[0]):
        return head, ids
    return probabilities_V.sort(descending=True)


def token_logprobs(logits_V: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Log-probability and rank of `token`, and the `count` most likely tokens."""
    total = logits_V.logsumexp(-1)
    chosen = logits_V[token]
    rank = int((logits_V > chosen).sum()) + 1
    if count == 0:
        return TokenLogprobs(float(chosen - total), rank, [], [])
    top, ids = logits_V.topk(min(count, len(logits_V)))
    return TokenLogprobs(float(chosen - total), rank, ids.tolist(), (top - total).tolist())


def label_logprobs(logits_MV: torch.Tensor, labels: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of each row's own labels, [len(labels)][len(row)]."""
    total_M = logits_MV.logsumexp(-1).tolist()
    if any(map(math.isnan, total_M)):
        raise BadLogitsError("a row to score has logits that are not numbers")
    flat = [(row, label) for row, ids in enumerate(labels) for label in ids]
    picked = iter(logits_MV[[row for row, _ in flat], [label for _, label in flat]].tolist())
    return [[next(picked) - total for _ in ids] for total, ids in zip(total_M, labels, strict=True)]
