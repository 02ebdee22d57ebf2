"""The law of tokens that checked guesses bring is the target's: chi-square over a vocabulary of eight, every filter.

The target is a table: logits of the next token by the token before. Expected frequencies come from a plain computation
of the filters; two tokens are looked at together, so the second depends on the first. Seeds are fixed, so p-values are
too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lowlat.engine.batch import SlotSampling
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.sampler import draw_guess, sample_bursts

VOCABULARY, RUNS, ANCHOR = 8, 2000, 3
FILTERS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1.7": {"temperature": 1.7},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all filters": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "bias and a ban": {"temperature": 1.0, "logit_bias": ((2, 1.5),), "banned": (5,), "banned_until": 100},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * 1.5


def law(logits: np.ndarray, options: dict, answer: list[int]) -> np.ndarray:
    """Probabilities of the next token, from the definitions of the options."""
    logits = logits.copy()
    for token, bias in options.get("logit_bias", ()):
        logits[token] += bias
    for token in set(answer):
        factor = options.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= options.get("presence_penalty", 0.0)
        logits[token] -= options.get("frequency_penalty", 0.0) * answer.count(token)
    logits[list(options.get("banned", ()))] = -np.inf
    p = np.exp((logits - logits.max()) / options["temperature"])
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = order[: options.get("top_k") or VOCABULARY]
    p_kept = p[kept] / p[kept].sum()
    if options.get("top_p", 1.0) < 1.0:
        count = int(np.searchsorted(np.cumsum(p_kept), options["top_p"])) + 1
        kept, p_kept = kept[:count], p_kept[:count]
    keep = p_kept >= options.get("min_p", 0.0) * p_kept[0]
    kept, p_kept = kept[keep], p_kept[keep]
    result = np.zeros(VOCABULARY)
    result[kept] = p_kept / p_kept.sum()
    return result


def p_value(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Of Pearson's chi-square; cells that expect fewer than five are put together."""
    rare = expected < 5
    cells = [*zip(observed[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0:
        cells.append((observed[rare].sum(), expected[rare].sum()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64))), freedom


@pytest.mark.parametrize("name", FILTERS)
def test_the_law_is_the_targets(name: str, record_property: Callable[[str, float], None]):
    """Guesses are in turn the draft's likeliest tokens, drawn with the target's own random numbers, and anything."""
    options = FILTERS[name]
    target = table(11)
    draft = target + 0.7 * table(12)
    logits = torch.from_numpy(target).float()
    random = np.random.default_rng(13)
    seen = np.zeros((VOCABULARY, VOCABULARY))
    accepted = 0
    for run in range(RUNS):
        history = {"prompt": (), "answer": ()}
        setting = SlotSampling(**{"top_k": 0, "top_p": 1.0, "seed": run * 7919, "logprobs": -1} | options | history)
        rules = LogitRules.of(setting, 0)
        guesses: list[int] = []
        for place in range(2):
            row = draft[[ANCHOR, *guesses][-1]]
            drawn = draw_guess(torch.from_numpy(row).float(), setting, 10 + place)
            guesses.append((int(row.argmax()), drawn, int(random.integers(VOCABULARY)))[run % 3])
        rows = logits[[ANCHOR, *guesses]]
        burst = sample_bursts(rows, [setting], [10], [rules], [guesses])[0][0]
        accepted += len(burst) - 1
        if len(burst) == 1:  # the second token comes from a step of its own
            burst += sample_bursts(logits[[burst[0]]], [setting], [11], [rules], [[]])[0][0]
        seen[burst[0], burst[1]] += 1
    first = law(target[ANCHOR], options, [])
    expected = np.stack([first[token] * law(target[token], options, [token]) for token in range(VOCABULARY)])
    assert seen[expected == 0].sum() == 0, "a token that a filter forbids"
    found, freedom = p_value(seen[expected > 0], RUNS * expected[expected > 0])
    record_property("p_value", found)
    print(f"{name}: p = {found:.4f} at {freedom} degrees of freedom, {accepted / RUNS:.2f} guesses right")
    assert found > 1e-3
    assert 0 < accepted < 2 * RUNS
