"""What a caller asks of the engine, and what the engine says back, one step at a time."""

from __future__ import annotations

import enum

import msgspec

from lowlat.engine.score_task import ScoreTask
from lowlat.grammars.grammar import Grammar as Grammar


class FinishReason(enum.StrEnum):
    """Why a request ended. Values are the OpenAI API's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen.

    Doors validate user input; the engine trusts these values. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and
    `min_p` 0 switch those filters off. Logits are changed in this order: bias, penalties, `min_tokens`, grammar,
    temperature, top-k, top-p, min-p. Log-probabilities are the model's own, taken before all of these.
    """

    max_tokens: int = 16
    """0 only scores the prompt."""
    min_tokens: int = 0
    """Stop and end-of-sequence tokens cannot be chosen before so many tokens."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Least probability of a token, as a part of the most likely one's."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt and the answer (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the answer holds it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Tokens that would break it cannot be chosen. A whole answer ends with an end-of-sequence token."""
    logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's; n: and those of the n most likely tokens."""
    speculate: bool = True
    """Whether steps may check guesses of later tokens, where the engine speculates. It never changes an answer."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first. The whole prompt is computed then, whatever is cached."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `arrival` is `time.monotonic()` of the machine, in seconds."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Higher runs first and may preempt lower; equal priorities keep their order of arrival."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    session_id: str = ""
    """Session whose pin moves to what this request computes when it ends; empty: none. Salts keep sessions apart."""
    session_ttl: float = 0.0
    """Seconds that the pin stays after the session's last request has ended."""
    arrival: float = 0.0
    score: ScoreTask | None = None
    """What to read of the prompt, instead of an answer."""


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
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For the next prompt tokens, in order; the first prompt token has none."""
    queue_s: float = 0.0
    """Seconds between arrival and the first step that computed something for this request."""
    error: str | None = None
    scores: list[list[float]] | None = None
    """For the next rows of a `ScoreTask`, in order: the log-probability of each label."""
