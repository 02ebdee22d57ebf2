"""What a caller asks of the engine, and what the engine says back, one step at a time."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a request ended. Values are the OpenAI API's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen.

    Doors validate user input; the engine trusts these values. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1
    switch those filters off. Log-probabilities are taken before temperature and filters.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's; n: and those of the n most likely tokens."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `arrival` is `time.monotonic()` of the machine, in seconds."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Higher runs first and may preempt lower; equal priorities keep their order of arrival."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    arrival: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token, its rank (1 = most likely), and the most likely tokens, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, array_like=True):
    """What one step brought for one request. The last output of a request has a finish reason."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop or end-of-sequence token that ended the request; it is the last of `token_ids`."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    queue_s: float = 0.0
    """Seconds between arrival and the first step that computed something for this request."""
    error: str | None = None


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges and counters of the engine, sent to the front a few times a second and when it becomes idle."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    low_latency_steps: list[tuple[str, str, int]] = []
    """(path, reason, steps): path `plugin` or `general`; the reason is `covered` for `plugin`."""
