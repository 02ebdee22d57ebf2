"""Bytes of steps and shapes of models: counts against figures worked out elsewhere and against real tensors."""

import json
import statistics

import msgspec
import pytest
import torch

from lowlat.bench.arms.base import StepCase
from lowlat.bench.arms.torch_step import TorchStep
from lowlat.bench.presets import PRESETS, find_shape, shape_from_config
from lowlat.bench.random_checkpoint import RandomCheckpoint, weight_names, weight_shape
from lowlat.bench.roofline import dense_step_bytes, expected_distinct, v41_step_bytes

TINY = PRESETS["tiny"]

pytestmark = pytest.mark.usefixtures("one_thread")


# --- bytes


@pytest.mark.parametrize(
    ("name", "gigabytes", "floor_us"),
    [("llama-1b", 2.505, 551.8), ("qwen3-0.6b", 1.309, 288.4), ("qwen3-8b", 15.288, 3367)],
)
def test_dense_bytes_are_the_published_ones(name, gigabytes, floor_us):
    got = dense_step_bytes(PRESETS[name], requests=1, context=1024, dtype="bfloat16")
    assert got.total / 1e9 == pytest.approx(gigabytes, abs=1e-3)
    assert got.floor_us(4.54) == pytest.approx(floor_us, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "qwen"])
def test_dense_bytes_are_those_of_the_tensors_that_a_step_reads(name, dtype):
    shape = TINY if name == "tiny" else msgspec.structs.replace(TINY, qk_norm=True, tied=True, kv_heads=1)
    step = TorchStep(StepCase(shape=shape, context=8, dtype=dtype))
    counted = dense_step_bytes(shape, requests=1, context=8, dtype=dtype)
    assert counted.layers + counted.head == step.reference_bytes()


def test_bytes_grow_with_context_and_requests_and_split_over_ranks():
    one = dense_step_bytes(PRESETS["llama-1b"], requests=1, context=1024, dtype="bfloat16")
    eight = dense_step_bytes(PRESETS["llama-1b"], requests=8, context=2048, dtype="bfloat16")
    assert eight.kv == 16 * one.kv
    assert eight.layers == one.layers
    half = dense_step_bytes(PRESETS["llama-1b"], requests=1, context=1024, dtype="bfloat16", tp=2)
    assert half.kv == one.kv // 2
    assert one.total / 2 < half.total < 0.501 * one.total
    with pytest.raises(ValueError, match="evenly"):
        dense_step_bytes(PRESETS["smollm2"], requests=1, context=8, dtype="bfloat16", tp=2)
    with pytest.raises(ValueError, match="dtype"):
        dense_step_bytes(TINY, requests=1, context=8, dtype="int3")


def test_deepseek_bytes_at_tp4_and_six_rows():
    # the step of the specification's own calculator: 10.328 GB a rank, 9.118 of it weights of the 40 layers
    got = v41_step_bytes(rows=6, context=131072, tp=4)
    assert got.total / 1e9 == pytest.approx(10.328, abs=1e-3)
    assert got.layers / 1e9 == pytest.approx(9.118, abs=1e-3)
    assert got.head / 1e9 == pytest.approx(0.331, abs=1e-3)
    assert got.kv / 1e9 == pytest.approx(0.0854, abs=1e-4)
    fewer = v41_step_bytes(rows=6, context=131072, tp=4, layers=10, draft=False)
    assert fewer.layers < got.layers / 3.5
    assert fewer.draft == 0
    with pytest.raises(ValueError, match="40 layers"):
        v41_step_bytes(rows=1, context=1, tp=1, layers=41)


def test_expected_distinct_experts_against_a_simulation():
    generator = torch.Generator().manual_seed(0)
    draws = [
        len({int(e) for _ in range(6) for e in torch.randperm(384, generator=generator)[:6]}) for _ in range(300)
    ]  # fmt: skip
    assert statistics.mean(draws) == pytest.approx(expected_distinct(6, 384, 6), rel=0.01)


# --- shapes


def test_presets_survive_their_own_config(tmp_path):
    for name, shape in PRESETS.items():
        assert shape_from_config(shape.config(), name) == shape
    (tmp_path / "config.json").write_text(json.dumps(TINY.config()))
    assert find_shape(str(tmp_path)).layers == 2
    assert find_shape("llama-1b", 3).layers == 3
    for model, layers, match in (
        ("nothing", None, "neither a preset"), ("tiny", 5, "2 layers"), ("deepseek-v41", None, "no dense model"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            find_shape(model, layers)
    with pytest.raises(ValueError, match="GPT2"):
        shape_from_config({"architectures": ["GPT2LMHeadModel"]}, "x")
    with pytest.raises(ValueError, match="hidden_size"):
        shape_from_config(
            {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "num_hidden_layers": 1}, "x"
        )


def test_random_weights_repeat_and_differ_by_name():
    first, second = RandomCheckpoint(TINY, 0), RandomCheckpoint(TINY, 0)
    names = list(weight_names(TINY))
    assert first.names() == sorted(names)
    assert all(name in first and first.shape(name) == weight_shape(TINY, name) for name in names)
    for name in names:
        assert torch.equal(first.tensor(name, torch.float32), second.tensor(name, torch.float32))
        assert first.tensor(name, torch.float32).shape == weight_shape(TINY, name)
    gate, up = (first.tensor(f"model.layers.0.mlp.{part}_proj.weight", torch.float32) for part in ("gate", "up"))
    assert not torch.equal(gate, up)
    part = first.tensor("lm_head.weight", torch.float32, rows=slice(8, 16), columns=slice(0, 4))
    assert torch.equal(part, first.tensor("lm_head.weight", torch.float32)[8:16, :4])
