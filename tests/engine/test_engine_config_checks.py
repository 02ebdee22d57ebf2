"""Settings that cannot be are refused by their flag before anything is loaded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lowlat import Engine
from lowlat.engine.config import EngineConfig
from lowlat.engine.config_checks import check_numbers, context_of
from lowlat.engine.setup_error import SetupError


class Checkpoint(msgspec.Struct):
    """What is asked of one."""

    config: dict[str, Any]
    name: str = "a-model"


def test_the_defaults_pass():
    check_numbers(EngineConfig())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_batch": 0}, "--max-batch 0: use 1 or more"),
        ({"page_size": 0}, "--page-size 0: use 1 or more"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0: use 1 or more"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0: use 1 or more"),
        ({"threads": -2}, "--threads -2: use 1 or more"),
        ({"run_ahead": -1}, "--run-ahead -1: use 0 or more"),
        ({"replay_tail": -1}, "--replay-tail -1: use 0 or more"),
        ({"session_budget": 1.5}, "--session-budget 1.5: use a part of the KV cache, 0 to 1"),
        ({"session_ttl": 10.0, "session_ttl_max": 5.0}, "--session-ttl 10: use more than 0 and at most"),
        ({"spec": "dspak"}, "--spec dspak is not known; known: off, ngram, draft, draft-model, dflash"),
        ({"spec_width": 4}, "--spec-width 4 needs guesses: add --spec ngram or another"),
        ({"spec_simulate_acceptance": 2.5}, "--spec-simulate-acceptance 2.5 needs guesses: add --spec ngram"),
        ({"spec": "ngram", "spec_width": 17}, "--spec-width 17: use 2 to 16, or auto"),
        (
            {"draft": "folder"},
            "--draft folder needs guesses: add --spec draft-model or its kind (dflash, dflash2, dspark)",
        ),
        ({"spec": "ngram", "draft": "folder"}, "--draft folder: --spec ngram has no use for it"),
        ({"spec": "dspark"}, "--spec dspark needs --draft PATH: a folder that lowlat train-draft wrote"),
        ({"spec": "draft-model"}, "--spec draft-model needs --draft PATH: a model folder or file"),
        ({"spec": "dspark", "draft": "no-such-draft"}, "--draft: no-such-draft is no draft: "),
    ],
)
def test_a_setting_that_cannot_be_is_named_before_a_model_is_looked_for(settings, said):
    with pytest.raises(SetupError) as refused:
        Engine(model="no-such-model", **settings)
    assert str(refused.value).startswith(said)


def test_a_context_is_the_models_or_smaller():
    checkpoint = Checkpoint({"max_position_embeddings": 128})
    assert context_of(EngineConfig(), checkpoint) == 128
    assert context_of(EngineConfig(max_context=2), checkpoint) == 2
    for length in (1, 129):
        with pytest.raises(SetupError, match=rf"--max-context {length}: .* use 2 to 128"):
            context_of(EngineConfig(max_context=length), checkpoint)
    with pytest.raises(SetupError, match=r"a-model: .* has no max_position_embeddings"):
        context_of(EngineConfig(), Checkpoint({}))
