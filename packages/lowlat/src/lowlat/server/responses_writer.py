"""Wording of `/v1/responses`: items whole, and their events in order while they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lowlat.server.answers import Usage
from lowlat.server.blocks import BlockStream, TextKind, parts_of
from lowlat.server.chat_writer import new_call_id
from lowlat.server.errors import ApiError
from lowlat.server.generation import Generation, join_deltas
from lowlat.server.responses_answers import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponsesAnswer,
    ResponsesEvent,
    ResponsesUsage,
    new_id,
)
from lowlat.server.responses_requests import ResponsesRequest
from lowlat.text.output import Delta
from lowlat.text.tokenizer import Tokenizer
from lowlat.text.tool_calls.parts import Content, Part, Reasoning, ToolCall

_encode = msgspec.json.Encoder().encode
_STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


def _item(kind: TextKind, id: str, text: str | None, status: str = "completed") -> OutputItem:
    """A message or reasoning item; `text` None: its part has not begun."""
    if kind is Content:
        parts = [] if text is None else [OutputText(text=text)]
        return _plain(MessageItem(id=id, content=parts, status=status))
    thoughts = [] if text is None else [ReasoningText(text=text)]
    return _plain(ReasoningItem(id=id, content=thoughts, status=status))


def _plain(item: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(item)
    return found


def _call_item(call: ToolCall, id: str, call_id: str, *, begun: bool = False) -> OutputItem:
    """The item of a call; `begun`: as its first event shows it, without arguments."""
    return _plain(
        FunctionCallItem(
            id=id,
            call_id=call_id,
            name=call.name,
            arguments="" if begun else call.arguments,
            status="in_progress" if begun else "completed",
        )
    )


class ResponsesWriter:
    """One response. `chunks` and `whole` run its generation."""

    def __init__(
        self, generation: Generation, body: ResponsesRequest, model: str, tokenizer: Tokenizer, created: int
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._output: list[OutputItem] = []
        self._thought = ""
        self._sequence = 0
        self._ids: tuple[str, str] = ("", "")
        self._answer = ResponsesAnswer(
            id=f"resp_{generation.public_id}",
            created_at=created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            temperature=1.0 if body.temperature is None else body.temperature,
            text={"format": _format(body)},
            tool_choice=msgspec.to_builtins(body.tool_choice) or "auto",
            tools=msgspec.to_builtins(body.tools or []),
            top_p=1.0 if body.top_p is None else body.top_p,
        )

    async def whole(self) -> AsyncIterator[bytes]:
        """The whole answer, as the only item."""
        last: Delta | None = None
        async for _, delta in self._generation.deltas():
            last = delta if last is None else join_deltas(last, delta)
        assert last is not None
        for part in parts_of(last):
            self._keep(part)
        yield _encode(self._finished(last))

    def _keep(self, part: Part) -> None:
        if isinstance(part, ToolCall):
            self._output.append(_call_item(part, new_id("fc"), new_call_id()))
        else:
            self._output.append(_item(type(part), new_id("msg" if isinstance(part, Content) else "rs"), part.text))
            if isinstance(part, Reasoning):
                self._thought += part.text

    def _finished(self, last: Delta) -> ResponsesAnswer:
        status = _STATUS.get(str(last.finish_reason), "completed")
        return msgspec.structs.replace(
            self._answer,
            status=status,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            output=self._output,
            usage=self._usage(self._generation.usage()),
        )

    def _usage(self, usage: Usage) -> ResponsesUsage:
        thought = self._tokenizer.encode(self._thought, add_special_tokens=False) if self._thought else []
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(min(len(thought), usage.completion_tokens)),
            total_tokens=usage.total_tokens,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of a stream."""
        blocks = BlockStream(self)
        yield self._event("response.created", response=self._answer) + self._event(
            "response.in_progress", response=self._answer
        )
        try:
            async for _, delta in self._generation.deltas():
                out = blocks.push(parts_of(delta))
                if delta.finished:
                    out += blocks.close()
                    answer = self._finished(delta)
                    name = "response.incomplete" if answer.status == "incomplete" else "response.completed"
                    out += self._event(name, response=answer)
                if out:
                    yield out
        except ApiError as error:
            failed = msgspec.structs.replace(
                self._answer,
                status="failed",
                error=ResponseError(error.detail.code or "server_error", error.detail.message),
                output=self._output,
            )
            yield self._event("response.failed", response=failed)

    def _event(self, type: str, **fields: Any) -> bytes:
        data = _encode(ResponsesEvent(type=type, sequence_number=self._sequence, **fields))
        self._sequence += 1
        return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"

    def begin(self, index: int, kind: TextKind) -> bytes:
        id = new_id("msg" if kind is Content else "rs")
        self._ids = (id, "output_text" if kind is Content else "reasoning_text")
        return self._event(
            "response.output_item.added", output_index=index, item=_item(kind, id, None, "in_progress")
        ) + self._event(
            "response.content_part.added", item_id=id, output_index=index, content_index=0, part=_part(kind, "")
        )

    def piece(self, index: int, kind: TextKind, text: str) -> bytes:
        id, name = self._ids
        more: dict[str, Any] = {"logprobs": []} if kind is Content else {}
        return self._event(
            f"response.{name}.delta", item_id=id, output_index=index, content_index=0, delta=text, **more
        )

    def end(self, index: int, kind: TextKind, text: str) -> bytes:
        id, name = self._ids
        item = _item(kind, id, text)
        self._output.append(item)
        if kind is Reasoning:
            self._thought += text
        more: dict[str, Any] = {"logprobs": []} if kind is Content else {}
        place: dict[str, Any] = {"item_id": id, "output_index": index, "content_index": 0}
        return (
            self._event(f"response.{name}.done", text=text, **place, **more)
            + self._event("response.content_part.done", part=_part(kind, text), **place)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def call(self, index: int, call: ToolCall) -> bytes:
        id, call_id = new_id("fc"), new_call_id()
        item = _call_item(call, id, call_id)
        self._output.append(item)
        place: dict[str, Any] = {"item_id": id, "output_index": index}
        return (
            self._event(
                "response.output_item.added", output_index=index, item=_call_item(call, id, call_id, begun=True)
            )
            + self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
            + self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **place)
            + self._event("response.output_item.done", output_index=index, item=item)
        )


def _part(kind: TextKind, text: str) -> dict[str, Any]:
    return _plain(OutputText(text=text) if kind is Content else ReasoningText(text=text))


def _format(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    found: dict[str, Any] = msgspec.to_builtins(body.text.format)
    return {key: value for key, value in found.items() if value is not None}
