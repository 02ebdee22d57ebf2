"""What the scheduler knows of a live request, and of a step in flight."""

from __future__ import annotations

from lowlat.cache.prefix import Lease
from lowlat.cache.sessions import Session
from lowlat.engine.batch import PrefillChunk, SlotSampling
from lowlat.engine.request import GenerateRequest
from lowlat.engine.score_task import ScoreProgress
from lowlat.grammars.matcher import GrammarLine


class ActiveRequest:
    """A request inside the scheduler, from submission until its pages are free again."""

    __slots__ = (
        "cached_tokens",
        "end",
        "ended",
        "filled",
        "grammar",
        "in_flight",
        "last_step",
        "launched",
        "launched_samples",
        "lease",
        "marks",
        "order",
        "prefill_end",
        "prompt_tokens",
        "queue_s",
        "request",
        "score",
        "scored",
        "seed",
        "sent_pages",
        "session",
        "slot",
        "spoiled",
        "stops",
        "tokens",
        "width",
    )

    def __init__(
        self,
        request: GenerateRequest,
        order: tuple[int, int],
        seed: int,
        stops: frozenset[int],
        width: int = 1,
        score: ScoreProgress | None = None,
        grammar: GrammarLine | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        self.order = order
        """(-priority, arrival number): smaller runs first."""
        self.seed = seed
        self.stops = stops
        self.tokens = list(request.prompt_ids)
        """Prompt and the answer so far, as far as the host knows."""
        self.prompt_tokens = len(request.prompt_ids)
        self.width = width if request.sampling.speculate else 1
        """Most rows of a decode step."""
        self.end = self.prompt_tokens + request.sampling.max_tokens
        """Tokens of prompt and longest answer."""
        self.session: Session | None = None
        self.slot = -1
        self.lease: Lease | None = None
        self.sent_pages = 0
        """Page-table entries that the device has."""
        self.prefill_end = 0
        """Tokens that were there at the last admission: after them, decoding begins."""
        self.launched = 0
        """Tokens whose keys and values are computed once all launched steps are done; with guesses, the most."""
        self.filled = 0
        """Tokens whose keys and values are computed by finished steps."""
        self.launched_samples = 0
        """Answer tokens known or on their way; with guesses, the least."""
        self.scored = 0 if request.sampling.prompt_logprobs is not None else self.prompt_tokens - 1
        """Prompt tokens after the first whose log-probabilities are known, on their way or not wanted."""
        self.score = score
        self.marks: dict[int, int] = {}
        """Tokens computed -> state row that holds the state after them."""
        self.in_flight = 0
        self.last_step = -1
        self.ended = False
        self.spoiled = False
        """Ended because its logits were not numbers."""
        self.cached_tokens = -1
        self.queue_s = 0.0

    def __lt__(self, other: ActiveRequest) -> bool:
        return self.order < other.order

    def slot_sampling(self) -> SlotSampling:
        """What rank 0 must know to choose this request's next tokens."""
        sampling = self.request.sampling
        speculates = self.width > 1
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        history = speculates or self.grammar is not None or penalties != (1.0, 0.0, 0.0)
        return SlotSampling(
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            self.seed,
            -1 if sampling.logprobs is None else sampling.logprobs,
            sampling.min_p,
            *penalties,
            logit_bias=sampling.logit_bias,
            banned=tuple(self.stops) if sampling.min_tokens else (),
            banned_until=self.prompt_tokens + sampling.min_tokens,
            width=self.width,
            end=self.end,
            prompt=tuple(self.tokens[: self.prompt_tokens]) if history else (),
            answer=tuple(self.tokens[self.prompt_tokens :]) if history else (),
            grammar=self.grammar,
            keep_going=self.grammar is not None and sampling.ignore_eos,
        )

    @property
    def shareable(self) -> int:
        """Tokens that later requests may have too: all but those of items, which do not see each other."""
        return len(self.tokens) if self.score is None else self.score.query

    @property
    def shared(self) -> list[int]:
        """Those of them that are computed; none of a request whose values were not numbers."""
        return [] if self.spoiled else self.tokens[: min(self.filled, self.shareable)]

    @property
    def shared_limit(self) -> int:
        """Most tokens that may come from the prefix cache; 0 where prompt tokens are still to be scored."""
        if self.scored < self.prompt_tokens - 1:
            return 0
        return (len(self.tokens) if self.score is None else self.score.reusable) - 1

    @property
    def places(self) -> int:
        """Places for keys and values that the tokens so far need."""
        return len(self.tokens) if self.score is None else self.score.places

    def place(self, row: int) -> int:
        """Where token `row` has its keys and values."""
        return row if self.score is None else self.score.place(row)

    def next_row(self, launched: int) -> int:
        """The next token to compute after the first `launched`."""
        return launched if self.score is None else self.score.start(launched)

    def targets(self, start: int, end: int) -> list[int]:
        """Prompt tokens to score in a chunk, each at the row before it; empty when there are none."""
        if self.scored >= min(end, self.prompt_tokens - 1):
            return []
        known = range(self.scored + 1, self.prompt_tokens)
        return [self.tokens[place] if place in known else -1 for place in range(start + 1, end + 1)]


class Launch:
    """What a launched step will bring: chunks first, then decode rows, in the order of the plan."""

    __slots__ = ("chunks", "decodes", "rows", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.chunks: list[tuple[ActiveRequest, int, PrefillChunk]] = []
        """(request, tokens filled afterwards, what was planned)."""
        self.decodes: list[ActiveRequest] = []
        self.rows: list[int] = []
        """For each decode, the state row that it may be saved to; -1: none."""
