"""Scores of items behind a query: which sequences to compute, in which order, and what their log-probabilities mean.

Two ways lead to the same scores. `sis`: one sequence an item, query and item, where later ones find the query in the
prefix cache. `mis`: all items in one sequence behind one query, each seeing the query and itself alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.engine.score_task import ScoreTask

Mode = Literal["sis", "mis"]
Preference = Literal["auto", "sis", "mis"]

MIS_ITEM_TOKENS = 64
"""Mean length of items up to which one sequence is the cheaper way."""


class ScoreInput(msgspec.Struct, kw_only=True):
    """What is asked, in token ids. Doors check it."""

    query: list[int]
    items: list[list[int]]
    labels: list[list[int]]
    """One list for all items, or a list for each."""
    item_first: bool = False
    """Each prompt is an item and then the query."""
    extraction: int | None = None
    """Read after every place of this token in an item, instead of after the item's end."""

    def reads(self, item: int) -> list[int]:
        """Places in an item after which its labels are read; -1 is the place before an item (an empty one's end)."""
        ids = self.items[item]
        if self.extraction is None:
            return [len(ids) - 1]
        return [place for place, id in enumerate(ids) if id == self.extraction]

    def labels_of(self, item: int) -> list[int]:
        """The labels of one item."""
        return self.labels[0] if len(self.labels) == 1 else self.labels[item]


class ScoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine can take, as far as scoring goes."""

    max_context: int
    max_batch: int
    page_size: int
    chunk_tokens: int
    item_tokens: int
    """Most tokens of an item beside others in one sequence; 0: the model cannot have several items there."""


class ScoreSequence(msgspec.Struct):
    """One request of a plan, and the items whose rows it reads, in order."""

    prompt: list[int]
    task: ScoreTask
    items: list[int]


class ScorePlan(msgspec.Struct):
    """Sequences to compute, wave by wave: a wave starts when the one before it has ended."""

    mode: Mode
    waves: list[list[ScoreSequence]]

    @property
    def most(self) -> int:
        """Sequences that are open at a time."""
        return max(map(len, self.waves), default=0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, whether computed or found in the cache."""
        return sum(len(sequence.prompt) for wave in self.waves for sequence in wave)


def check_input(asked: ScoreInput, nested: bool, vocab_size: int, max_context: int) -> None:
    """Raises `ValueError` where labels or sizes are wrong. `nested`: the labels were a list for each item."""
    if nested and len(asked.labels) != len(asked.items):
        raise ValueError(f"{len(asked.labels)} lists of labels for {len(asked.items)} items")
    for labels in asked.labels:
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"labels must be there, and each once: {labels[:8]}")
    bad = [id for ids in (asked.query, *asked.items, *asked.labels) for id in ids if not 0 <= id < vocab_size]
    if bad:
        raise ValueError(f"token ids {bad[:5]} are outside the vocabulary of {vocab_size}")
    for number, item in enumerate(asked.items):
        if not 0 < len(asked.query) + len(item) <= max_context:
            raise ValueError(f"query and item {number}: {len(asked.query) + len(item)} tokens; 1 to {max_context} fit")


def can_mis(asked: ScoreInput, limits: ScoreLimits) -> str | None:
    """None where the items can be scored in one sequence, else why not."""
    if not limits.item_tokens:
        return "this model keeps state for a request and cannot have several items in one sequence"
    if asked.item_first:
        return "with item_first the items have no beginning in common"
    longest = max(map(len, asked.items), default=0)
    if longest > limits.item_tokens:
        return f"this model takes items of at most {limits.item_tokens} tokens there, and one has {longest}"
    # All chunks of items use the same places behind the query (`ScoreProgress.places`).
    places = len(asked.query) + min(sum(map(len, asked.items)), max(limits.chunk_tokens, longest))
    if places > limits.max_context:
        return f"query and a chunk of items need {places} places, more than the context of {limits.max_context}"
    return None


def choose_mode(asked: ScoreInput, limits: ScoreLimits, preferred: Preference = "auto") -> Mode:
    """The way to take where a request leaves it open: the preferred one if it is possible, else the cheaper one.

    See docs/decisions/0109-items-in-one-sequence-by-cost.md.
    """
    if preferred == "sis" or len(asked.items) < 2 or can_mis(asked, limits) is not None:
        return "sis"
    long = sum(map(len, asked.items)) > MIS_ITEM_TOKENS * len(asked.items)
    return "sis" if long and preferred == "auto" else "mis"


def plan_score(asked: ScoreInput, mode: Mode, limits: ScoreLimits) -> ScorePlan:
    """The sequences that answer `asked`."""
    numbers = range(len(asked.items))
    if mode == "mis":
        filled = [number for number in numbers if asked.items[number]]
        alone = [_alone(asked, number) for number in numbers if not asked.items[number]]
        wave = [*([_together(asked, filled)] if filled else []), *alone]
        return ScorePlan(mode, [wave[at : at + limits.max_batch] for at in range(0, len(wave), limits.max_batch)])
    sequences = [_alone(asked, number) for number in numbers]
    waves, begin = [], 0
    if len(sequences) > 1 and len(asked.query) >= limits.page_size and not asked.item_first:
        # The first item brings the query into the cache; the others find it there.
        waves, begin = [sequences[:1]], 1
    waves += [sequences[at : at + limits.max_batch] for at in range(begin, len(sequences), limits.max_batch)]
    return ScorePlan(mode, waves)


def _alone(asked: ScoreInput, number: int) -> ScoreSequence:
    item, query = asked.items[number], asked.query
    prompt, before = (item + query, 0) if asked.item_first else (query + item, len(query))
    if asked.item_first and asked.extraction is None:
        rows = [len(prompt) - 1]
    else:
        rows = [before + place for place in asked.reads(number)]
    return ScoreSequence(prompt, ScoreTask(rows=rows, labels=[asked.labels_of(number)]), [number] * len(rows))


def _together(asked: ScoreInput, numbers: list[int]) -> ScoreSequence:
    prompt, rows, owners = list(asked.query), [], []
    for number in numbers:
        places = asked.reads(number)
        rows += [len(prompt) + place for place in places]
        owners += [number] * len(places)
        prompt += asked.items[number]
    labels = asked.labels if len(asked.labels) == 1 else [asked.labels_of(number) for number in owners]
    return ScoreSequence(
        prompt, ScoreTask(rows=rows, labels=labels, items=[len(asked.items[number]) for number in numbers]), owners
    )


def request_of(
    sequence: ScoreSequence, id: str, *, priority: int = 0, cache_salt: str = "", arrival: float = 0.0
) -> GenerateRequest:
    """What the engine is asked."""
    return GenerateRequest(
        id=id,
        prompt_ids=sequence.prompt,
        sampling=SamplingParams(max_tokens=0, temperature=0.0),
        priority=priority,
        cache_salt=cache_salt,
        arrival=arrival,
        score=sequence.task,
    )


def score_of(logprobs: Sequence[float], apply_softmax: bool, temperature: float) -> list[float]:
    """Scores of one reading: the labels' probabilities, or with `apply_softmax` their shares among the labels.

    `temperature` divides log-probabilities before they are made shares.
    """
    if not apply_softmax:
        return [math.exp(value) for value in logprobs]
    most = max(logprobs)
    if most == -math.inf:
        return [0.0] * len(logprobs)
    weights = [math.exp((value - most) / temperature) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
