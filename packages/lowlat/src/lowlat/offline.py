"""A model in this process: `from lowlat import Engine`."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lowlat.engine.build import Progress, build_engine
from lowlat.engine.config import EngineConfig
from lowlat.engine.executor import ExecutorError
from lowlat.engine.request import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from lowlat.engine.sampling_check import check_sampling
from lowlat.engine.score_waves import Readings, ScoreWaves
from lowlat.engine.scoring import Preference, ScoreInput, ScoreLimits, check_input, choose_mode, plan_score, score_of
from lowlat.engine.stats import EngineStats
from lowlat.engine.token_gaps import mean_and_p90_ms, token_gaps
from lowlat.text.chat import ChatTemplateError
from lowlat.text.output import Delta, OutputAssembler, TokenLogprob

Prompt = str | Sequence[int]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one generation."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """Seconds to the first step and to the first token, and milliseconds between tokens (mean and 90th percentile;
    tokens of one step have gap 0)."""

    queue_s: float
    first_token_s: float
    gap_mean_ms: float | None
    gap_p90_ms: float | None
    total_s: float


class Generation(msgspec.Struct, frozen=True):
    """A whole answer. Text, ids, log-probabilities and usage end at the same token."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprobs] | None
    """For each prompt token but the first, where they were asked for."""
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timings: Timings


class Session(msgspec.Struct, frozen=True):
    """Names an agent whose prefix stays cached between its requests, for `ttl` seconds (None: the engine's default).

    Sessions of different salts share nothing, prefixes included.
    """

    id: str
    ttl: float | None = None
    cache_salt: str = ""


class SpeculationReport(msgspec.Struct, frozen=True):
    """What guesses came to, over all that an engine has generated."""

    guessed: int
    accepted: int
    tokens_per_step: float | None
    """Tokens that a step brought a request, in steps of decodes alone."""
    break_even: float | None
    """Tokens a step above which guesses gain time: how much longer than plain ones these steps took."""
    simulated_acceptance: float | None
    """Tokens a step that a benchmark counts as right, whatever is: the text means nothing then."""


class Engine:
    """Loads a model and generates with it, in the calling thread.

    >>> with Engine(model="smollm2") as engine:
    ...     print(engine.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0)).text)

    Not safe for use from several threads at once; give several prompts in one call instead, they share each step.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, progress: Progress | None = None, **settings: Any
    ) -> None:
        """`settings` are fields of `EngineConfig`, for example `model`, `dtype`, `max_batch`.

        Raises:
            SetupError, CheckpointError, UnsupportedModelError: the model or the settings cannot be used.
        """
        self.config = msgspec.structs.replace(config or EngineConfig(), **settings)
        self._core, self.facts, self._checkpoint = build_engine(self.config, progress or (lambda *_: None))
        self.tokenizer = self._checkpoint.tokenizer()
        self._chat = self._checkpoint.chat(self.tokenizer)
        self._numbers = itertools.count()

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        session: Session | None = None,
    ) -> Any:
        """Continue one prompt (text or token ids) or several at once; returns a `Generation` or a list of them.

        With a `session`, what the request that ends last has computed stays cached for the session's next one.

        Raises:
            ValueError: an empty prompt, more tokens than the context holds, or a sampling parameter out of its bounds.
        """
        single = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        prompts: Sequence[Prompt] = [prompt] if single else prompt  # type: ignore[assignment,list-item]
        many = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        runs = [self._start(one, settings, stop, session) for one, settings in zip(prompts, many, strict=True)]
        try:
            for _ in self._drive(runs):
                pass
        except BaseException:
            self._abandon(run.request.id for run in runs)
            raise
        generations = [run.generation() for run in runs]
        return generations[0] if single else generations

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        session: Session | None = None,
    ) -> Iterator[Delta]:
        """Continue one prompt, piece by piece. Ending the iteration early cancels the request."""
        run = self._start(prompt, sampling, stop, session)
        try:
            for _, delta in self._drive([run]):
                yield delta
        finally:
            self._abandon([run.request.id])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        session: Session | None = None,
    ) -> Generation:
        """Answer a chat. Raises `ChatTemplateError` where the model has no template or it refuses the messages."""
        generation = self.generate(self.chat_ids(messages), sampling, stop=stop, session=session)
        assert isinstance(generation, Generation)
        return generation

    def score(
        self,
        query: Prompt,
        items: Sequence[Prompt],
        label_token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        apply_softmax: bool = False,
        temperature: float = 1.0,
        item_first: bool = False,
        mode: Preference = "auto",
    ) -> list[list[float]]:
        """Probabilities of label tokens right after `query` and each of `items`, without generation: [items][labels].

        `label_token_ids` is one list for all items, or a list for each. With `apply_softmax` the shares among an
        item's labels, of log-probabilities divided by `temperature`; without it the probabilities in the whole
        vocabulary. `mode` never changes a score (see `lowlat.engine.scoring`). Special tokens that begin a prompt are
        added to texts where the prompt begins.

        >>> engine.score("Is water wet? Answer:", [" yes", " no"], label_token_ids=[198, 13])  # doctest: +SKIP

        Raises:
            ValueError: no labels, or not a list of them for each item; ids outside the vocabulary; too many tokens.
        """
        nested = len(label_token_ids) > 0 and not isinstance(label_token_ids[0], int)
        labels: list[list[int]] = [list(ids) for ids in (label_token_ids if nested else [label_token_ids])]  # type: ignore
        asked = ScoreInput(
            query=self._ids(query, not item_first),
            items=[self._ids(item, item_first) for item in items],
            labels=labels,
            item_first=item_first,
        )
        check_input(asked, nested, self.facts.vocab_size, self.facts.max_context)
        readings = self._score(asked, mode)
        return [score_of(places[0], apply_softmax, temperature) for places in readings]

    def _score(self, asked: ScoreInput, mode: Preference) -> Readings:
        limits = ScoreLimits(
            max_context=self.facts.max_context,
            max_batch=self.config.max_batch,
            page_size=self.facts.page_size,
            chunk_tokens=self.config.chunk_tokens,
            item_tokens=self.facts.item_tokens,
        )
        plan = plan_score(asked, choose_mode(asked, limits, mode), limits)
        waves = ScoreWaves(plan, f"score-{next(self._numbers)}", len(asked.items), arrival=time.monotonic())
        try:
            while requests := waves.next_wave():
                for request in requests:
                    self._core.submit(request)
                while waves.open:
                    for output in self._core.turn():
                        if output.error is not None:
                            raise RuntimeError(output.error)
                        waves.take(output)
        except BaseException:
            self._abandon(waves.open)
            raise
        return waves.readings

    def _ids(self, prompt: Prompt, special: bool) -> list[int]:
        return self.tokenizer.encode(prompt, special) if isinstance(prompt, str) else [int(token) for token in prompt]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat, up to where the answer begins."""
        if self._chat is None:
            raise ChatTemplateError(f"{self.facts.model} has no chat template: use generate with a plain prompt")
        return self._chat.encode(messages, self.tokenizer)

    def end_session(self, session: Session) -> bool:
        """Give back what a session pins; false when it had expired, lost its pin or never was."""
        return self._core.end_session(session.id, session.cache_salt)

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        return self._core.stats()

    def speculation(self) -> SpeculationReport | None:
        """What guesses came to so far; None without `spec`."""
        if self.config.spec == "off":
            return None
        stats = self._core.stats()
        return SpeculationReport(
            stats.guessed_tokens,
            stats.accepted_tokens,
            stats.tokens_per_step,
            stats.break_even,
            self.config.spec_simulate_acceptance,
        )

    def close(self) -> None:
        """End threads and ranks and free the model."""
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, prompt: Prompt, sampling: SamplingParams | None, stop: Sequence[str], session: Session | None
    ) -> _Run:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        bad = [token for token in ids if not 0 <= token < self.facts.vocab_size]
        if not ids or bad:
            raise ValueError(f"token ids {bad[:5]} are outside the vocabulary" if bad else "the prompt is empty")
        sampling = sampling or SamplingParams()
        check_sampling(sampling, self.facts.vocab_size)
        room = self.facts.max_context - len(ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.facts.max_context}")
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        session = session or Session("")
        request = GenerateRequest(
            id=f"local-{next(self._numbers)}",
            prompt_ids=ids,
            sampling=sampling,
            cache_salt=session.cache_salt,
            session_id=session.id,
            session_ttl=self._session_ttl(session),
            arrival=time.monotonic(),
        )
        assembler = OutputAssembler(
            self.tokenizer,
            stop=stop,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs is not None,
            continues=isinstance(prompt, str) or sampling.grammar is not None,
        )
        self._core.submit(request)
        return _Run(request, assembler)

    def _session_ttl(self, session: Session) -> float:
        limit = self.config.session_ttl_max
        ttl = self.config.session_ttl if session.ttl is None else session.ttl
        if not 0 < ttl <= limit:
            raise ValueError(f"a session's ttl is above 0 s and at most {limit:g} s (session_ttl_max), not {ttl:g}")
        return ttl

    def _drive(self, runs: list[_Run]) -> Iterator[tuple[_Run, Delta]]:
        """Turn the engine until all `runs` have ended, yielding what each step brings."""
        open_runs = {run.request.id: run for run in runs}
        while open_runs:
            for output in self._core.turn():
                run = open_runs.get(output.id)
                if run is None:
                    continue
                delta = run.take(output)
                if delta.finished:
                    del open_runs[output.id]
                    if output.finish_reason is None:  # a stop string: the engine does not know yet
                        self._core.abort(output.id, FinishReason.STOP)
                yield run, delta

    def _abandon(self, ids: Iterable[str]) -> None:
        """Cancel what has not ended, and let the engine come to rest."""
        for id in list(ids):
            self._core.abort(id)
        with contextlib.suppress(ExecutorError):  # it was raised to the caller already
            while self._core.has_work:
                self._core.turn()


class _Run:
    """One request on its way."""

    def __init__(self, request: GenerateRequest, assembler: OutputAssembler) -> None:
        self.request = request
        self._assembler = assembler
        self._deltas: list[Delta] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._arrivals: list[tuple[float, int]] = []
        self._cached_tokens = 0
        self._queue_s = 0.0

    def take(self, output: RequestOutput) -> Delta:
        """Take in what a step brought."""
        if output.error is not None:
            raise RuntimeError(output.error)
        self._prompt_logprobs.extend(output.prompt_logprobs or [])
        if output.token_ids:
            self._arrivals.append((time.monotonic(), len(output.token_ids)))
            self._cached_tokens, self._queue_s = output.cached_tokens, output.queue_s
        entries = output.logprobs if output.token_ids else []
        delta = self._assembler.push(output.token_ids, entries, output.finish_reason, output.stop_token_id)
        self._deltas.append(delta)
        return delta

    def generation(self) -> Generation:
        """The whole answer."""
        last = self._deltas[-1]
        entries = [entry for delta in self._deltas for entry in delta.logprobs or []]
        return Generation(
            text="".join(delta.text for delta in self._deltas),
            token_ids=[token for delta in self._deltas for token in delta.token_ids],
            logprobs=entries if self.request.sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs if self.request.sampling.prompt_logprobs is not None else None,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
            usage=Usage(len(self.request.prompt_ids), last.completion_tokens, self._cached_tokens),
            timings=self._timings(),
        )

    def _timings(self) -> Timings:
        arrivals = self._arrivals
        mean_ms, p90_ms = mean_and_p90_ms(token_gaps(arrivals, self._deltas[-1].completion_tokens))
        return Timings(
            queue_s=self._queue_s,
            first_token_s=arrivals[0][0] - self.request.arrival if arrivals else 0.0,
            gap_mean_ms=mean_ms,
            gap_p90_ms=p90_ms,
            total_s=time.monotonic() - self.request.arrival,
        )
