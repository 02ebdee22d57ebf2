"""Settings that cannot be: refused when the engine is built, each by its flag, with what to use instead."""

from __future__ import annotations

from pathlib import Path

from lowlat.cache.rules import PrefillRules
from lowlat.engine.config import EngineConfig
from lowlat.engine.setup_error import SetupError
from lowlat.models.base import Model, prefill_rules
from lowlat.models.loading.checkpoint import Checkpoint
from lowlat.speculative.draft_files import ARCHITECTURES, DraftFileError, load_config, shipped_draft

_LEAST = {
    "tensor_parallel": 1,
    "threads": 1,
    "max_batch": 1,
    "chunk_tokens": 1,
    "page_size": 1,
    "run_ahead": 0,
    "replay_tail": 0,
    "replay_prefix": 0,
}
"""The smallest value of each; where None is allowed, it means a choice of the engine's."""
_PROPOSERS = ("off", "ngram", "draft", "draft-model", *ARCHITECTURES)
MOST_WIDTH = 16
"""Rows of a request in a step that checks guesses."""


def check_numbers(config: EngineConfig) -> None:
    """What can be told without a model: sizes, and sessions' budget and lifetimes. Raises `SetupError`."""
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise SetupError(f"--{name.replace('_', '-')} {value}: use {least} or more")
    if not 0 <= config.session_budget <= 1:
        raise SetupError(f"--session-budget {config.session_budget}: use a part of the KV cache, 0 to 1")
    if not 0 < config.session_ttl <= config.session_ttl_max:
        raise SetupError(
            f"--session-ttl {config.session_ttl:g}: use more than 0 and at most --session-ttl-max, "
            f"which is {config.session_ttl_max:g}"
        )


def check_guesses(config: EngineConfig) -> None:
    """What can be told of guesses without a model. Raises `SetupError`."""
    if config.spec not in _PROPOSERS:
        raise SetupError(f"--spec {config.spec} is not known; known: {', '.join(_PROPOSERS)}")
    width, simulated = config.spec_width, config.spec_simulate_acceptance
    if config.spec == "off":
        for flag, value in (("--spec-width", width), ("--spec-simulate-acceptance", simulated)):
            if value is not None:
                raise SetupError(f"{flag} {value:g} needs guesses: add --spec ngram or another, or leave it out")
        if config.draft is not None:
            kinds = ", ".join(ARCHITECTURES)
            raise SetupError(f"--draft {config.draft} needs guesses: add --spec draft-model or its kind ({kinds})")
    if width is not None and not 2 <= width <= MOST_WIDTH:
        raise SetupError(f"--spec-width {width}: use 2 to {MOST_WIDTH}, or auto")
    path = draft_path(config)
    if path is not None and config.spec in ARCHITECTURES:
        try:
            kind = load_config(Path(path)).kind
        except DraftFileError as error:
            raise SetupError(f"--draft: {error}") from error
        if kind != config.spec:
            raise SetupError(f"--draft: {path} is a {kind} draft: use --spec {kind}")


def draft_path(config: EngineConfig) -> str | None:
    """Where the draft is that the configuration asks for; None: it asks for none. Raises `SetupError`."""
    if config.spec != "draft-model" and config.spec not in ARCHITECTURES:
        if config.draft is not None:
            raise SetupError(f"--draft {config.draft}: --spec {config.spec} has no use for it; leave it out")
        return None
    path = config.draft or shipped_draft(config.model, config.spec)
    if path is None:
        what = "a model folder or file" if config.spec == "draft-model" else "a folder that lowlat train-draft wrote"
        raise SetupError(f"--spec {config.spec} needs --draft PATH: {what}")
    return path


def context_of(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Longest prompt and answer, in tokens: the configuration's or the model's own. Raises `SetupError`."""
    limit = checkpoint.config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise SetupError(f"{checkpoint.name}: config.json has no max_position_embeddings")
    if config.max_context is None:
        return limit
    if not 2 <= config.max_context <= limit:
        raise SetupError(
            f"--max-context {config.max_context}: the model's own context is {limit} tokens; use 2 to {limit}"
        )
    return config.max_context


def rules_of(config: EngineConfig, model: Model) -> PrefillRules:
    """What the model asks of prefills. Raises `SetupError` where settings ask for what it does not do."""
    if config.engram_placement != "auto" and getattr(model, "engram_placement", None) is None:
        raise SetupError(
            f"--engram-placement {config.engram_placement}: {config.model} has no Engram tables; leave it out"
        )
    rules = prefill_rules(model)
    for flag, wanted, done in (
        ("--replay-tail", config.replay_tail, rules.tail),
        ("--replay-prefix", config.replay_prefix, rules.replay),
    ):
        if wanted and not done:
            raise SetupError(f"{flag} {wanted}: {config.model} has no bounded replay; leave it out")
    if config.chunk_tokens < rules.last_chunk:
        raise SetupError(
            f"--chunk-tokens {config.chunk_tokens}: a prompt's last chunk has at least {rules.last_chunk} tokens with "
            f"this model; use {rules.last_chunk} or more"
        )
    return rules
