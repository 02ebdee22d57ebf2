"""Wording of `/v1/chat/completions`: content, reasoning and tool calls, whole and streamed."""

from __future__ import annotations

import uuid

import msgspec
from msgspec import UNSET

from lowlat.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    FunctionAnswer,
    FunctionDelta,
    Timings,
    ToolCallAnswer,
    ToolCallDelta,
    Usage,
    chat_logprobs,
)
from lowlat.server.generation import Choice, Generation
from lowlat.server.responses import event
from lowlat.server.writers import NoUsage, prompt_table
from lowlat.text.output import Delta
from lowlat.text.tool_calls.parts import Content, Part, Reasoning, ToolCall

_encode = msgspec.json.Encoder().encode


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def finish_reason(delta: Delta, calls: int) -> str | None:
    """An answer that ended by itself and holds calls ended to have them answered."""
    return "tool_calls" if calls and delta.finish_reason == "stop" else delta.finish_reason


class ChatWriter:
    def __init__(self, generation: Generation, model: str, created: int) -> None:
        self._id = f"chatcmpl-{generation.public_id}"
        self._model = model
        self._created = created
        self._with_ids = generation.plan.return_token_ids
        self._calls: dict[int, int] = {}
        """By choice, from its first chunk on: calls so far."""

    def events(self, choice: Choice, delta: Delta, usage: NoUsage, timings: Timings | None) -> bytes:
        first = choice.index not in self._calls
        self._calls.setdefault(choice.index, 0)
        if delta.parts is None:
            deltas = [ChatDelta(content=delta.text if first or delta.text else UNSET)]
        else:
            deltas = [piece for part in delta.parts for piece in self._deltas(choice.index, part)] or [ChatDelta()]
        if first:
            deltas[0].role = "assistant"
        chunks = [ChatChunkChoice(index=choice.index, delta=piece) for piece in deltas]
        chunks[0].logprobs = chat_logprobs(delta.logprobs)
        if self._with_ids:
            chunks[0].token_ids = delta.token_ids
        if first:
            chunks[0].prompt_token_ids = choice.prompt_ids if self._with_ids else UNSET
            chunks[0].prompt_logprobs = prompt_table(choice)
        if delta.finished:
            chunks[-1].finish_reason = finish_reason(delta, self._calls[choice.index])
            chunks[-1].stop_reason = delta.stop_reason
        last = UNSET if timings is None else timings
        return b"".join(
            event(self._chunk([chunk], usage, last if number == len(chunks) - 1 else UNSET))
            for number, chunk in enumerate(chunks)
        )

    def _deltas(self, choice: int, part: Part) -> list[ChatDelta]:
        if isinstance(part, Content):
            return [ChatDelta(content=part.text)]
        if isinstance(part, Reasoning):
            return [ChatDelta(reasoning_content=part.text)]
        number = self._calls[choice]
        self._calls[choice] += 1
        begin = FunctionDelta(name=part.name, arguments="")
        pieces = [
            ToolCallDelta(index=number, id=new_call_id(), type="function", function=begin),
            ToolCallDelta(index=number, function=FunctionDelta(arguments=part.arguments)),
        ]
        return [ChatDelta(tool_calls=[piece]) for piece in pieces]

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | NoUsage, timings: Timings | msgspec.UnsetType
    ) -> bytes:
        return _encode(
            ChatChunk(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
            )
        )

    def usage_chunk(self, usage: Usage, timings: Timings) -> bytes:
        return self._chunk([], usage, timings)

    def whole(self, answers: list[tuple[Choice, Delta]], usage: Usage, timings: Timings) -> bytes:
        choices = [
            ChatChoice(
                index=choice.index,
                message=message_of(delta),
                logprobs=chat_logprobs(delta.logprobs),
                finish_reason=finish_reason(delta, _calls_in(delta)),
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if self._with_ids else UNSET,
                prompt_token_ids=choice.prompt_ids if self._with_ids else UNSET,
                prompt_logprobs=prompt_table(choice),
            )
            for choice, delta in answers
        ]
        return _encode(
            ChatCompletion(
                id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
            )
        )


def _calls_in(delta: Delta) -> int:
    return sum(isinstance(part, ToolCall) for part in delta.parts or ())


def message_of(delta: Delta) -> AssistantMessage:
    """A whole answer as a message; content is null where there are calls or reasoning and no content."""
    if delta.parts is None:
        return AssistantMessage(content=delta.text)
    reasoning = "".join(part.text for part in delta.parts if isinstance(part, Reasoning))
    calls = [
        ToolCallAnswer(id=new_call_id(), function=FunctionAnswer(name=part.name, arguments=part.arguments))
        for part in delta.parts
        if isinstance(part, ToolCall)
    ]
    return AssistantMessage(
        content=delta.text or (None if calls or reasoning else ""),
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
