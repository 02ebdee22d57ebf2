"""One HTTP request's sequences, from the engine's outputs to deltas of text, with usage and timings at the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec

from lowlat.engine.client import EngineClient
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput
from lowlat.engine.request_stream import RequestStream
from lowlat.engine.token_gaps import mean_and_p90_ms, token_gaps
from lowlat.server.answers import PromptTokensDetails, Timings, Usage
from lowlat.server.errors import engine_failed
from lowlat.server.plan import Plan
from lowlat.server.prompt_part import PromptPart
from lowlat.text.output import Delta, OutputAssembler
from lowlat.text.tokenizer import Tokenizer
from lowlat.text.tool_calls.parts import joined


class Choice:
    """One sequence of a request: its number in the answer and the text made so far."""

    __slots__ = (
        "assembler",
        "begun",
        "cached_tokens",
        "engine_id",
        "finish_reason",
        "index",
        "prompt",
        "prompt_ids",
        "queue_s",
    )

    def __init__(self, index: int, engine_id: str, prompt_ids: list[int], plan: Plan, tokenizer: Tokenizer) -> None:
        self.index = index
        self.engine_id = engine_id
        self.prompt_ids = prompt_ids
        self.prompt = PromptPart(
            tokenizer,
            prompt_ids,
            echo=plan.echo,
            echo_logprobs=plan.sampling.logprobs,
            table_logprobs=plan.prompt_logprobs,
            skip_special_tokens=plan.skip_special_tokens,
        )
        self.assembler = OutputAssembler(
            tokenizer,
            stop=plan.stop,
            include_stop=plan.include_stop,
            min_tokens=plan.sampling.min_tokens,
            logprobs=plan.sampling.logprobs is not None,
            skip_special_tokens=plan.skip_special_tokens,
            text_offset=len(self.prompt.text),
            continues=plan.continues,
            reader=plan.reading.reader() if plan.reading is not None else None,
        )
        self.begun = False
        """Whether a delta has been made of it."""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.queue_s: float | None = None


class Generation:
    """A request in the engine. Iterate over it once; it ends when every choice has its finish reason.

    Ids inside the engine are private (the public id is free for reuse as soon as this request ends, even while the
    engine still finishes steps that it launched for it).
    """

    def __init__(
        self, public_id: str, plan: Plan, tokenizer: Tokenizer, engine: EngineClient, arrival: float, serial: int
    ) -> None:
        """`arrival`: `time.monotonic()` of the request; `serial`: a number no other request of this process has."""
        self.public_id = public_id
        self.plan = plan
        self.arrival = arrival
        self._engine = engine
        self._stream: RequestStream | None = None
        self._ended_at: float | None = None
        self.choices = [
            Choice(prompt * plan.n + number, f"{serial:x}.{prompt * plan.n + number}", ids, plan, tokenizer)
            for prompt, ids in enumerate(plan.prompts)
            for number in range(plan.n)
        ]
        self._by_id = {choice.engine_id: choice for choice in self.choices}

    @property
    def sequences(self) -> int:
        return len(self.choices)

    def submit(self) -> None:
        """Send all sequences to the engine.

        Raises:
            EngineUnavailableError: the engine is not ready.
        """
        plan = self.plan
        self._stream = self._engine.submit(
            *(
                GenerateRequest(
                    id=choice.engine_id,
                    prompt_ids=choice.prompt_ids,
                    sampling=plan.sampling_of(choice.index // plan.n, choice.index % plan.n),
                    priority=plan.priority,
                    cache_salt=plan.cache_salt,
                    session_id=plan.session_id,
                    session_ttl=plan.session_ttl,
                    arrival=self.arrival,
                )
                for choice in self.choices
            )
        )

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the engine brings, as it comes; the last delta of each choice has its finish reason.

        Raises:
            ApiError: 500; the engine ended or refused a sequence. The others of this request are cancelled.
        """
        assert self._stream is not None
        try:
            async for output in self._stream:
                choice = self._by_id[output.id]
                if choice.finish_reason is not None:
                    continue
                if output.prompt_logprobs:
                    choice.prompt.take(output.prompt_logprobs)
                if output.token_ids or output.finish_reason is not None:
                    yield choice, self._push(choice, output)
        finally:
            self.cancel()
            self._ended_at = time.monotonic()

    def _push(self, choice: Choice, output: RequestOutput) -> Delta:
        if output.finish_reason is FinishReason.ERROR:
            choice.finish_reason = "error"
            raise engine_failed(output.error or "the engine could not finish this request")
        choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
        if choice.queue_s is None and output.token_ids:
            choice.queue_s = output.queue_s
        delta = choice.assembler.push(
            # An end without a token (an abort) has no scores.
            output.token_ids,
            output.logprobs or [],
            output.finish_reason,
            self._stop_reason(choice, output),
        )
        if delta.finished:
            choice.finish_reason = delta.finish_reason
            if output.finish_reason is None:
                self._engine.abort(choice.engine_id, "stop")
        if not choice.begun:
            choice.begun = True
            if self.plan.echo:
                return join_deltas(choice.prompt.echo(), delta)
        return delta

    def _stop_reason(self, choice: Choice, output: RequestOutput) -> int | None:
        """The stop token's id, where the client named it; an end of sequence by the model's own token has none."""
        asked = self.plan.sampling.stop_token_ids
        return output.stop_token_id if output.stop_token_id in asked else None

    def cancel(self) -> None:
        """End every sequence that still runs: it ends with finish reason `abort`, its memory is given back."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._engine.abort(choice.engine_id)

    @property
    def finish_reasons(self) -> list[str]:
        """Per choice; `abort` for one that has not ended."""
        return [choice.finish_reason or "abort" for choice in self.choices]

    def usage(self) -> Usage:
        """Tokens of all choices; each prompt counts once, however many choices it has."""
        prompt = sum(len(ids) for ids in self.plan.prompts)
        completion = sum(choice.assembler.completion_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.plan.n])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def timings(self) -> Timings:
        """Seen from the server: waiting and first token of the earliest choice, gaps of all choices together."""
        arrivals = self._stream.arrivals if self._stream is not None else {}
        gaps = [
            gap
            for id, events in arrivals.items()
            for gap in token_gaps(events, self._by_id[id].assembler.completion_tokens)
        ]
        first = min((events[0][0] for events in arrivals.values() if events), default=None)
        mean_ms, p90_ms = mean_and_p90_ms(gaps)
        waits = [choice.queue_s for choice in self.choices if choice.queue_s is not None]
        return Timings(
            queue_s=round(min(waits, default=0.0), 6),
            first_token_s=None if first is None else round(first - self.arrival, 6),
            total_s=round((self._ended_at or time.monotonic()) - self.arrival, 6),
            gap_mean_ms=None if mean_ms is None else round(mean_ms, 4),
            gap_p90_ms=None if p90_ms is None else round(p90_ms, 4),
        )


def join_deltas(first: Delta, second: Delta) -> Delta:
    """One delta that says what two of the same choice say one after the other."""
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        parts=None if second.parts is None else joined([*(first.parts or []), *second.parts]),
    )
