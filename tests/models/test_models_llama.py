"""Logits of tiny random Llamas equal those of transformers: whole prompts, token by token, and ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_kit import (
    GREEDY,
    build,
    check_one_request,
    check_ragged_batch,
    expected_logits,
    make_runner,
    save_random,
)

from lowlat.engine.batch import PrefillChunk, StepPlan
from lowlat.models.base import BuildContext
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import SingleRank
from lowlat.platform import select

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def make_pair(path: Path, **changes: Any) -> tuple[Any, Any]:
    """The same random weights in transformers and here."""
    return save_random(path, "Llama", **changes), build(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_equal_transformers(shape: str, tmp_path: Path):
    check_one_request(*make_pair(tmp_path, **SHAPES[shape]))


@pytest.mark.parametrize("min_rows", [1, 4, 8])
def test_ragged_batches_equal_transformers(min_rows: int, tmp_path: Path):
    check_ragged_batch(*make_pair(tmp_path), min_rows=min_rows)


def test_long_prefills_go_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference, model = make_pair(tmp_path)
    tokens = torch.randint(131, (100,), generator=torch.Generator().manual_seed(4)).tolist()
    expected = expected_logits(reference, tokens)[99]
    monkeypatch.setattr("lowlat.layers.attention._MASK_ENTRIES", 2000)
    runner, recorder = make_runner(model)
    runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, list(range(34)))], [PrefillChunk(0, 0, tokens[:40], False)], []))
    runner.run(StepPlan(1, [], [], [PrefillChunk(0, 40, tokens[40:], True)], []))
    torch.testing.assert_close(recorder.logits[0], expected, atol=1e-4, rtol=0)


def test_padding_rows_write_no_page(tmp_path: Path):
    _, model = make_pair(tmp_path)
    runner, _ = make_runner(model, page_size=2, pages=20, min_rows=8)
    runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, [5, 9])], [PrefillChunk(0, 0, [1, 2, 3], True)], []))
    written = {slot for slot in range(42) if not bool(runner.kv.keys[0][slot].isnan().any())}
    assert written == {10, 11, 18}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NopeForCausalLM"]}, "NopeForCausalLM is not supported; known: .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_key_value_heads": 4}, "6 attention heads do not share 4"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope scaling 'spiral'"),
    ],
)
def test_unsupported_models_say_why(changes: dict[str, Any], message: str, tmp_path: Path):
    make_pair(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.config.update(changes)
    context = BuildContext(select("cpu"), SingleRank(), torch.float32, 256)
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(checkpoint, context, lambda done, total: None)
