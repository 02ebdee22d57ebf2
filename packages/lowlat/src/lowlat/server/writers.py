"""Deltas to bytes: whole answers and streams, for completions and for chats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec
from msgspec import UNSET

from lowlat.server.answers import Completion, CompletionChoice, Timings, Usage, completion_logprobs
from lowlat.server.generation import Choice, Generation, join_deltas
from lowlat.server.prompt_part import PromptLogprobs
from lowlat.server.responses import DONE, event
from lowlat.text.output import Delta

_encode = msgspec.json.Encoder().encode


NoUsage = msgspec.UnsetType | None
"""The `usage` of a chunk that has none: null where usage was asked for, else left out."""


class Writer(Protocol):
    """How one of the two APIs words an answer."""

    def events(self, choice: Choice, delta: Delta, usage: NoUsage, timings: Timings | None) -> bytes: ...
    def usage_chunk(self, usage: Usage, timings: Timings) -> bytes: ...
    def whole(self, answers: list[tuple[Choice, Delta]], usage: Usage, timings: Timings) -> bytes: ...


async def stream(generation: Generation, writer: Writer, include_usage: bool) -> AsyncIterator[bytes]:
    """The events of a stream. The last chunk with a choice carries `timings`; with `include_usage` the usage chunk."""
    no_usage = None if include_usage else UNSET
    left = len(generation.choices)
    async for choice, delta in generation.deltas():
        if not delta.finished:
            if delta.text or delta.parts or delta.logprobs or (delta.token_ids and generation.plan.return_token_ids):
                yield writer.events(choice, delta, no_usage, None)
            continue
        left -= 1
        if left:
            yield writer.events(choice, delta, no_usage, None)
            continue
        timings = generation.timings()
        last = writer.events(choice, delta, no_usage, None if include_usage else timings)
        if include_usage:
            last += event(writer.usage_chunk(generation.usage(), timings))
        yield last + DONE


async def collect(generation: Generation, writer: Writer) -> AsyncIterator[bytes]:
    """The whole answer, as the only item."""
    answers: dict[int, tuple[Choice, Delta]] = {}
    async for choice, delta in generation.deltas():
        earlier = answers.get(choice.index)
        answers[choice.index] = (choice, delta if earlier is None else join_deltas(earlier[1], delta))
    ordered = [answers[index] for index in sorted(answers)]
    yield writer.whole(ordered, generation.usage(), generation.timings())


def prompt_table(choice: Choice) -> PromptLogprobs | msgspec.UnsetType:
    table = choice.prompt.table()
    return UNSET if table is None else table


class CompletionWriter:
    """Wording of `/v1/completions`."""

    def __init__(self, generation: Generation, model: str, created: int) -> None:
        self._id = f"cmpl-{generation.public_id}"
        self._model = model
        self._created = created
        self._with_ids = generation.plan.return_token_ids
        self._begun: set[int] = set()

    def events(self, choice: Choice, delta: Delta, usage: NoUsage, timings: Timings | None) -> bytes:
        return event(
            _encode(
                Completion(
                    id=self._id,
                    created=self._created,
                    model=self._model,
                    choices=[self._choice(choice, delta)],
                    usage=usage,
                    timings=UNSET if timings is None else timings,
                )
            )
        )

    def usage_chunk(self, usage: Usage, timings: Timings) -> bytes:
        return _encode(
            Completion(id=self._id, created=self._created, model=self._model, choices=[], usage=usage, timings=timings)
        )

    def whole(self, answers: list[tuple[Choice, Delta]], usage: Usage, timings: Timings) -> bytes:
        choices = [self._choice(choice, delta) for choice, delta in answers]
        return _encode(
            Completion(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
            )
        )

    def _choice(self, choice: Choice, delta: Delta) -> CompletionChoice:
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        return CompletionChoice(
            index=choice.index,
            text=delta.text,
            logprobs=completion_logprobs(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason if delta.finished else UNSET,
            token_ids=delta.token_ids if self._with_ids else UNSET,
            prompt_token_ids=choice.prompt_ids if self._with_ids and first else UNSET,
            prompt_logprobs=prompt_table(choice) if first else UNSET,
        )
