"""Bodies and answers of `/v1/score`, and the checks that lead to what the engine is asked."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lowlat.engine.scoring import ScoreInput
from lowlat.server.answers import Timings, Usage
from lowlat.server.errors import bad_field
from lowlat.server.plan import check_ids
from lowlat.server.requests import IGNORED, RequestId, TokenId, no_op
from lowlat.server.state import ReadyModel

MAX_LABELS = 1024
"""Most labels of an item."""
MAX_VALUES = 1 << 18
"""Most numbers in `scores`."""


class ScoreFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the scoring routes have in common."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    mode: Literal["auto", "sis", "mis"] | None = None
    """`sis`: one sequence an item; `mis`: all items in one sequence; `auto`: the cheaper one. Scores are the same."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: Annotated[Any, IGNORED] = None


class ScoreRequest(ScoreFields, kw_only=True):
    """Body of `POST /v1/score`."""

    query: str | list[TokenId] | None = None
    items: str | list[str | list[TokenId]] | None = None
    label_token_ids: list[int | list[int]] | None = None
    apply_softmax: bool | None = None
    temperature: float | None = None
    item_first: bool | None = None
    return_token_logprobs: bool | None = None
    score_extraction_token: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    return_pooled_hidden_states: Annotated[Any, no_op(False)] = None
    embed_override_token_id: Annotated[Any, no_op()] = None
    query_embed_overrides: Annotated[Any, no_op()] = None
    item_embed_overrides: Annotated[Any, no_op()] = None


Values = list[list[float | list[float]]]


class ScoringAnswer(msgspec.Struct, kw_only=True):
    """What the answers of the scoring routes have in common."""

    id: str
    created: int
    model: str
    mode: str
    """How it was computed: `sis` or `mis`."""
    usage: Usage
    timings: Timings


class ScoreAnswer(ScoringAnswer, kw_only=True):
    """Answer of `POST /v1/score`: by item and label, and by place too with `score_extraction_token`."""

    object: str = "scoring"
    scores: Values
    token_logprobs: Values | None
    """Log-probabilities of the labels, where asked for."""
    pooled_hidden_states: None = None


def check_temperature(body: ScoreRequest) -> float:
    """The temperature of the shares among labels. Raises ApiError (400)."""
    temperature = 1.0 if body.temperature is None else body.temperature
    if not (math.isfinite(temperature) and temperature > 0):
        raise bad_field("temperature", "must be finite and above 0")
    if temperature != 1.0 and not body.apply_softmax:
        raise bad_field("temperature", "changes nothing without apply_softmax: true; leave it out or at 1")
    return temperature


def check_labels(given: list[int | list[int]] | None, items: int, vocab_size: int) -> list[list[int]]:
    """Label ids: one list for all items, or a list for each.

    Raises:
        ApiError: 400; empty, repeated, negative, outside the vocabulary, or not as many lists as items.
    """
    name = "label_token_ids"
    if given is None:
        raise bad_field(name, "is required: the token ids whose probabilities are wanted", code="missing_field")
    if not given:
        raise bad_field(name, "must have a label")
    nested = isinstance(given[0], list)
    if any(isinstance(entry, list) != nested for entry in given):
        raise bad_field(name, "is a list of ids, or a list of such lists, one for each item; not a mixture")
    if nested and len(given) != items:
        raise bad_field(name, f"{len(given)} lists of labels for {items} items; send one for each, or one list of ids")
    lists: list[list[int]] = given if nested else [given]  # type: ignore[assignment,list-item]
    for number, ids in enumerate(lists):
        where = f"{name}[{number}]" if nested else name
        if not ids:
            raise bad_field(where, "must have a label")
        if len(ids) > MAX_LABELS:
            raise bad_field(where, f"at most {MAX_LABELS} labels, got {len(ids)}")
        if len(set(ids)) < len(ids):
            place = next(at for at, id in enumerate(ids) if id in ids[:at])
            raise bad_field(f"{where}[{place}]", f"the label {ids[place]} is there twice")
        if min(ids) < 0:
            place = next(at for at, id in enumerate(ids) if id < 0)
            raise bad_field(f"{where}[{place}]", f"token ids are not negative, got {ids[place]}")
        check_ids(ids, where, vocab_size)
    return lists


async def score_input(body: ScoreRequest, model: ReadyModel, max_items: int) -> ScoreInput:
    """What a checked body asks, in token ids.

    Raises:
        ApiError: 400 naming the field.
    """
    if body.items is None:
        raise bad_field("items", "is required: a text, texts, or lists of token ids", code="missing_field")
    items = [body.items] if isinstance(body.items, str) else body.items
    if len(items) > max_items:
        raise bad_field("items", f"at most {max_items} items a request, got {len(items)}")
    texts = [isinstance(item, str) for item in items]
    if any(texts) and not all(texts):
        raise bad_field("items", "are all texts or all lists of token ids")
    vocab_size = model.engine.vocab_size
    first = bool(body.item_first)
    labels = check_labels(body.label_token_ids, len(items), vocab_size)
    asked = ScoreInput(
        query=await _ids(body.query or "", "query", not first, model),
        items=[await _ids(item, f"items[{number}]", first, model) for number, item in enumerate(items)],
        labels=labels,
        item_first=first,
        extraction=await _extraction(body.score_extraction_token, model),
    )
    _check_sizes(asked, model.engine.max_context)
    return asked


async def _ids(given: str | list[int], where: str, special: bool, model: ReadyModel) -> list[int]:
    """Token ids of a query or an item; the frame of the model (BOS) goes where the prompt begins."""
    if isinstance(given, str):
        await asyncio.sleep(0)  # thousands of items must not hold up the streams of others
        return await model.text.encode(given, special)
    if given:
        check_ids(given, where, model.engine.vocab_size)
    return given


async def _extraction(text: str | None, model: ReadyModel) -> int | None:
    if text is None:
        return None
    ids = await model.text.encode(text, False)
    if len(ids) != 1:
        raise bad_field("score_extraction_token", f"must be one token of this model; it is {len(ids)}: {ids[:8]}")
    return ids[0]


def _check_sizes(asked: ScoreInput, max_context: int) -> None:
    values = 0
    for number, item in enumerate(asked.items):
        size = len(asked.query) + len(item)
        if size == 0:
            raise bad_field(f"items[{number}]", "no token comes out of query and item")
        if size > max_context:
            raise bad_field(
                f"items[{number}]",
                f"query and item have {size} tokens; this model's context is {max_context}",
                code="context_length_exceeded",
            )
        reads = len(asked.reads(number))
        if reads == 0:
            raise bad_field(f"items[{number}]", "score_extraction_token does not occur in it")
        values += reads * len(asked.labels_of(number))
    if values > MAX_VALUES:
        raise bad_field("items", f"the answer would have {values} scores; the limit is {MAX_VALUES}: send fewer items")
