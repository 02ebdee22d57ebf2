"""From a checked body to what the engine is asked: prompt ids, sampling parameters, and their limits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from lowlat.engine.config import EngineConfig
from lowlat.engine.request import SamplingParams
from lowlat.server.errors import ApiError, bad_field
from lowlat.server.grammar_fields import grammar_of
from lowlat.server.requests import ChatRequest, CompletionRequest, GenerationFields
from lowlat.text.tool_calls.formats import Reading

GREEDY_BELOW = 1e-4
"""A temperature below this is taken as 0: logits divided by it would leave float32."""


class Plan(msgspec.Struct, kw_only=True):
    """One HTTP request, ready to be sent to the engine: `len(prompts) * n` sequences."""

    prompts: list[list[int]]
    sampling: SamplingParams
    """For all choices; `sampling_of` has what differs between them."""
    max_tokens: list[int]
    """Per prompt: most tokens to generate, so that prompt + answer fit the context."""
    n: int
    stop: list[str]
    priority: int
    cache_salt: str
    session_id: str
    session_ttl: float
    """Seconds."""
    return_token_ids: bool
    continues: bool
    """A space at the answer's start belongs to it: it goes on from raw text (completions), or follows a grammar."""
    echo: bool
    """The answer begins with the prompt."""
    include_stop: bool
    skip_special_tokens: bool
    grammar_field: str
    """The field that asks for `sampling.grammar`."""
    prompt_logprobs: int | None
    """Alternatives of prompt tokens that the client asked for by themselves; those of an echo follow `logprobs`."""
    reading: Reading | None = None
    """How reasoning and tool calls are told from content; None: the text is content as it is."""

    def sampling_of(self, prompt: int, choice: int) -> SamplingParams:
        """Parameters of choice number `choice` of a prompt. Choice 0 keeps the request's seed, so `n` does not change
        it; the others get seeds derived from it."""
        seed = self.sampling.seed
        if seed is not None and choice > 0:
            seed = derived_seed(seed, choice)
        return msgspec.structs.replace(self.sampling, seed=seed, max_tokens=self.max_tokens[prompt])


def derived_seed(seed: int, choice: int) -> int:
    """A seed in [0, 2^63) for a later choice of the same request; equal on every machine."""
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_plan(
    body: GenerationFields,
    prompts: list[list[int]],
    *,
    prompt_field: str,
    logprobs: int | None,
    max_tokens: int | None,
    default_max_tokens: int | None,
    vocab_size: int,
    max_context: int,
    max_n: int,
    config: EngineConfig,
    continues: bool,
    echo: bool = False,
) -> Plan:
    """Check what depends on the model, and settle every default.

    `default_max_tokens` None: as many tokens as the context leaves.

    Raises:
        ApiError: 400 naming the field.
    """
    n = body.n or 1
    if n > max_n:
        raise bad_field("n", f"at most {max_n} choices, got {n}")
    for number, ids in enumerate(prompts):
        where = prompt_field if len(prompts) == 1 else f"{prompt_field}[{number}]"
        if len(ids) + 1 > max_context:
            raise bad_field(
                where,
                f"{len(ids)} tokens leave no room for an answer in this model's context of {max_context} tokens; "
                f"send at most {max_context - 1}",
                code="context_length_exceeded",
            )
    stop_ids = body.stop_token_ids or []
    for number, id in enumerate(stop_ids):
        if id >= vocab_size:
            raise bad_field(f"stop_token_ids[{number}]", _outside(id, vocab_size))
    asked = max_tokens if max_tokens is not None else default_max_tokens
    if body.min_tokens and asked is not None and body.min_tokens > asked:
        raise bad_field("min_tokens", f"{body.min_tokens} is more than the {asked} tokens that may be generated")
    sampling = sampling_params(body, logprobs, tuple(dict.fromkeys(stop_ids)), vocab_size, echo=echo)
    field, followed = grammar_of(body)
    return Plan(
        prompts=prompts,
        sampling=msgspec.structs.replace(sampling, grammar=followed),
        max_tokens=[max_context - len(ids) if asked is None else min(asked, max_context - len(ids)) for ids in prompts],
        n=n,
        stop=[body.stop] if isinstance(body.stop, str) else list(dict.fromkeys(body.stop or [])),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        session_id=body.session_id or "",
        session_ttl=session_ttl(body, config),
        return_token_ids=bool(body.return_token_ids),
        continues=continues or followed is not None,
        echo=echo,
        grammar_field=field,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        prompt_logprobs=body.prompt_logprobs,
    )


def session_ttl(body: GenerationFields, config: EngineConfig) -> float:
    """Seconds that a session's pin stays.

    Raises:
        ApiError: 400; a time without a session, or above the server's limit.
    """
    if body.session_ttl is None:
        return config.session_ttl
    if body.session_id is None:
        raise bad_field("session_ttl", "needs a session_id")
    if body.session_ttl > config.session_ttl_max:
        raise bad_field("session_ttl", f"at most {config.session_ttl_max:g} s (--session-ttl-max)")
    return body.session_ttl


def sampling_params(
    body: GenerationFields,
    logprobs: int | None,
    stop_token_ids: tuple[int, ...],
    vocab_size: int,
    *,
    echo: bool = False,
) -> SamplingParams:
    """The engine's parameters. `top_p` 0 means the most likely token alone, as `top_k` 1 does; `top_k` -1 is off.

    Raises:
        ApiError: 400; a token of `logit_bias` is outside the vocabulary.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k is None or body.top_k < 0 else min(body.top_k, vocab_size)
    if top_p == 0:
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=top_k,
        top_p=top_p,
        seed=None if body.seed is None else body.seed % 2**63,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        speculate=body.speculate is not False,
        logprobs=logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, logprobs if echo else None),
        min_tokens=body.min_tokens or 0,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
    )


def _most(first: int | None, second: int | None) -> int | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if int(key) >= vocab_size:
            raise bad_field(f"logit_bias.{key}", _outside(int(key), vocab_size))
    # "7" and "07" are the same token: the last one counts, as for equal keys of a JSON object.
    return tuple({int(key): value for key, value in bias.items()}.items())


def completion_prompts(body: CompletionRequest, max_prompts: int) -> Sequence[str | list[int]]:
    """The prompts of a completion request: text or ids.

    Raises:
        ApiError: 400; too many prompts, or texts and ids mixed at one level.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif isinstance(prompt[0], int):
        for number, item in enumerate(prompt):
            if not isinstance(item, int):
                raise bad_field(f"prompt[{number}]", "a list that begins with a token id holds token ids only")
        prompts = [prompt]  # type: ignore[list-item]
    else:
        kind = type(prompt[0])
        for number, item in enumerate(prompt):
            if type(item) is not kind:
                raise bad_field(f"prompt[{number}]", "the prompts of a list are all texts or all lists of token ids")
        prompts = prompt  # type: ignore[assignment]
    if len(prompts) > max_prompts:
        raise bad_field("prompt", f"at most {max_prompts} prompts a request, got {len(prompts)}")
    return prompts


def check_ids(ids: list[int], where: str, vocab_size: int) -> None:
    """Raises ApiError (400) for the first id outside [0, vocab_size)."""
    if max(ids) >= vocab_size:
        number = next(n for n, id in enumerate(ids) if id >= vocab_size)
        raise bad_field(f"{where}[{number}]", _outside(ids[number], vocab_size))


def chat_logprobs(body: ChatRequest) -> int | None:
    """How many alternatives a chat request wants; None: no log-probabilities.

    Raises:
        ApiError: 400; `top_logprobs` without `logprobs: true`.
    """
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise bad_field("top_logprobs", "needs logprobs: true")
        return None
    return body.top_logprobs or 0


def chat_max_tokens(body: ChatRequest) -> int | None:
    """`max_completion_tokens`, or its older name.

    Raises:
        ApiError: 400; both are given and differ.
    """
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise bad_field("max_tokens", "differs from max_completion_tokens; send one of them")
    return new if new is not None else old


def check_model(name: str | None, served: str, path: str) -> None:
    """Raises ApiError (404) when a request names another model than the one served."""
    if name is not None and name not in (served, path):
        raise ApiError(
            404,
            f"model: {name!r} is not served here; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


def _outside(id: int, vocab_size: int) -> str:
    return f"token id {id} is outside the vocabulary of {vocab_size} ids"
