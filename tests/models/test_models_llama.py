"""Logits of tiny random Llamas equal those of transformers: whole prompts, token by token, and ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PlanLimits, PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.runner import ModelRunner
from lowlat.layers.step import StepInputs
from lowlat.models.base import BuildContext
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import SingleRank
from lowlat.platform import select

GREEDY = SlotSampling(0.0, 0, 1.0, 0, -1)
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


class Recorder:
    """A model that keeps the logits of its last step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits = torch.empty(0)

    def forward(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        self.logits = self.model.forward(step, kv)
        return self.logits


def make_pair(path: Path, seed: int = 0, **changes: Any) -> tuple[transformers.LlamaForCausalLM, Any]:
    """The same random weights in transformers and here."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**fields, **changes})).eval()
    reference.save_pretrained(path)
    build = BuildContext(select("cpu"), SingleRank(), torch.float32, 256)
    return reference, build_model(open_checkpoint(path), build, lambda done, total: None)


def make_runner(model: Any, *, page_size: int = 3, pages: int = 120, min_rows: int = 4) -> tuple[ModelRunner, Recorder]:
    limits = PlanLimits(max_batch=6, max_rows=256, max_pages=40)
    kv = KVPool(model.kv_layout(pages, page_size), torch.device("cpu"))
    for tensor in kv.keys + kv.values:
        tensor.fill_(float("nan"))  # whatever was never written must not matter
    recorder = Recorder(model)
    return ModelRunner(recorder, kv, limits, SingleRank(), min_rows=min_rows), recorder


def expected_logits(reference: transformers.LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_equal_transformers(shape: str, tmp_path: Path):
    reference, model = make_pair(tmp_path, **SHAPES[shape])
    tokens = torch.randint(131, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = expected_logits(reference, tokens)
    runner, recorder = make_runner(model)
    scattered = torch.randperm(120, generator=torch.Generator().manual_seed(2))[:30].tolist()
    for pages in (list(range(10, 40)), scattered):
        runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, pages)], [PrefillChunk(0, 0, tokens[:37], True)], []))
        torch.testing.assert_close(recorder.logits[0], expected[36], atol=1e-4, rtol=0)
        runner.run(StepPlan(1, [], [], [PrefillChunk(0, 37, tokens[37:50], True)], []))
        torch.testing.assert_close(recorder.logits[0], expected[49], atol=1e-4, rtol=0)
        for position in range(50, 70):
            runner._tokens[0] = tokens[position]
            runner.run(StepPlan(2, [], [], [], [0]))
            torch.testing.assert_close(recorder.logits[0], expected[position], atol=1e-4, rtol=0)


@pytest.mark.parametrize("min_rows", [1, 4, 8])
def test_ragged_batches_equal_transformers(min_rows: int, tmp_path: Path):
    reference, model = make_pair(tmp_path)
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 17, 18, 61]  # more than a factor of two apart: several decode groups
    texts = [torch.randint(131, (length + 9,), generator=generator).tolist() for length in lengths]
    expected = [expected_logits(reference, text) for text in texts]
    runner, recorder = make_runner(model, min_rows=min_rows)
    order = torch.randperm(120, generator=generator).tolist()
    pages = [(slot, 0, order[24 * slot : 24 * slot + 24]) for slot in range(5)]
    chunks = [PrefillChunk(slot, 0, text[:length], True) for slot, (text, length) in enumerate(zip(texts, lengths))]
    # The last two join later, beside decode rows of the first three.
    runner.run(StepPlan(0, [(slot, GREEDY) for slot in range(5)], pages, chunks[:3], []))
    done = lengths[:3]
    for slot in range(3):
        torch.testing.assert_close(recorder.logits[slot], expected[slot][done[slot] - 1], atol=1e-4, rtol=0)
        runner._tokens[slot] = texts[slot][done[slot]]
    runner.run(StepPlan(1, [], [], chunks[3:], [2, 0, 1]))
    for row, (slot, position) in enumerate([(3, 17), (4, 60), (2, 17), (0, 1), (1, 2)]):
        torch.testing.assert_close(recorder.logits[row], expected[slot][position], atol=1e-4, rtol=0)
    positions = [2, 3, 18, 18, 61]
    for _ in range(5):
        for slot in range(5):
            runner._tokens[slot] = texts[slot][positions[slot]]
        runner.run(StepPlan(2, [], [], [], [4, 1, 3, 0, 2]))
        for row, slot in enumerate([4, 1, 3, 0, 2]):
            torch.testing.assert_close(recorder.logits[row], expected[slot][positions[slot]], atol=1e-4, rtol=0)
        positions = [position + 1 for position in positions]


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
        ({"architectures": ["NopeForCausalLM"]}, "NopeForCausalLM is not supported; known: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
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
    build = BuildContext(select("cpu"), SingleRank(), torch.float32, 256)
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(checkpoint, build, lambda done, total: None)
