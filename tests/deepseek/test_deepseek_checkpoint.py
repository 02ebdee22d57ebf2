"""Random checkpoints: published names and formats, streamed, the same for the same seed; and reading a rank's part."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from deepseek_kit import open_folder
from dsv4_weights import read_raw, read_weights

from lowlat.layers.deepseek_numerics import Numerics
from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.config import read_deepseek_config
from lowlat.models.deepseek_v4.make_checkpoint import MakeCheckpointError, main, make_checkpoint
from lowlat.models.deepseek_v4.names import stored_tensors, weight_specs
from lowlat.models.deepseek_v4.presets import preset
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.models.loading.errors import CheckpointError


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_published_model_has_the_published_size() -> None:
    """The listing counts 96,085 tensors and about 510 GB, with 266 tensors of vision, which are not made here."""
    config = read_deepseek_config(preset("v41-flash"))
    tensors = [t for spec in weight_specs(config) for t in stored_tensors(spec, config.weight_block)]
    assert len(tensors) == len({t.name for t in tensors}) == 95_819
    assert sum(t.bytes for t in tensors) == pytest.approx(509.3e9, rel=1e-3)
    shapes = {t.name: (t.dtype, t.shape) for t in tensors}
    assert shapes["layers.7.attn.wq_b.weight"] == ("F8_E4M3", (32768, 1280))
    assert shapes["layers.7.attn.wq_b.scale"] == ("F8_E8M0", (1024, 40))
    assert shapes["layers.7.attn.wo_a.weight"] == ("F8_E4M3", (8192, 4096))
    assert shapes["layers.39.ffn.experts.383.w1.weight"] == ("I8", (2304, 2560))
    assert shapes["layers.39.ffn.experts.383.w2.scale"] == ("F8_E8M0", (5120, 72))
    assert shapes["layers.14.engram.embed.weight"] == ("F8_E4M3", (384016682, 256))
    assert shapes["layers.1.engram.wkv.weight"] == ("F8_E4M3", (25600, 6144))
    assert shapes["mtp.0.main_proj.weight"] == ("F8_E4M3", (5120, 15360))
    assert shapes["mtp.2.markov_head.head.weight"] == ("BF16", (129280, 256))
    assert shapes["layers.0.hc_ffn_fn"] == ("F32", (24, 20480))
    sources = [n for n in shapes if n.endswith("compressor.wkv.weight")]
    assert sources == [f"layers.{layer}.attn.compressor.wkv.weight" for layer in (2, 8, 14, 20)]
    assert "layers.20.attn.compressor.wgate.weight" not in shapes
    queries = [n.split(".")[1] for n in shapes if n.endswith("indexer.wq_b.weight")]
    assert queries == ["2", "8", "14", "20", "24", "28", "32", "36"]


def test_layers_use_the_nearest_source() -> None:
    config = read_deepseek_config(preset("v41-flash"))
    assert [config.kv_source(layer) for layer in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [config.index_source(layer) for layer in (7, 19, 23, 24, 31, 39)] == [2, 14, 20, 24, 28, 36]


def test_files_hold_what_the_index_says(tiny_v41: Path) -> None:
    raw = read_raw(tiny_v41)
    index = json.loads((tiny_v41 / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(raw)
    assert index["metadata"]["total_size"] == sum(array.nbytes for _, array in raw.values())
    for name, (kind, array) in raw.items():
        if kind == "F8_E4M3":
            assert not ((array & 0x7F) == 0x7F).any(), f"{name} holds NaN"
    weights = read_weights(tiny_v41, 32)
    for name in ("layers.0.attn.wq_a.weight", "layers.3.ffn.experts.5.w1.weight", "layers.1.engram.embed.weight"):
        assert 0.01 < weights[name].std() < 5, name
    assert len({weights[f"layers.{i}.attn.wkv.weight"].tobytes() for i in range(6)}) == 6


def test_same_seed_same_bytes_whatever_the_shards(tiny_v41: Path, tmp_path: Path) -> None:
    make_checkpoint("tiny-v41", tmp_path / "same", seed=0)
    assert digest(tmp_path / "same") == digest(tiny_v41)
    make_checkpoint("tiny-v41", tmp_path / "cut", seed=0, shard_bytes=1 << 20)
    assert len(list((tmp_path / "cut").glob("model-*.safetensors"))) >= 8
    cut, whole = read_raw(tmp_path / "cut"), read_raw(tiny_v41)
    assert all(np.array_equal(cut[name][1], array) for name, (_, array) in whole.items())
    make_checkpoint("tiny-v41", tmp_path / "other", seed=1)
    other = read_raw(tmp_path / "other")
    same = [
        name for name, (kind, array) in whole.items() if kind != "F8_E8M0" and np.array_equal(other[name][1], array)
    ]
    assert same == []


def test_writing_needs_little_memory(tmp_path: Path) -> None:
    config = preset("tiny-v41", vocab_size=100_000, engram_compressed_vocab_size=100_000)
    tracemalloc.start()
    size = make_checkpoint(config, tmp_path / "wide", seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 100e6
    assert peak < 60e6, f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB of weights"


def test_bad_requests_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MakeCheckpointError, match="known: tiny-v4, tiny-v41"):
        make_checkpoint("huge", tmp_path / "x")
    with pytest.raises(MakeCheckpointError, match="free"):
        make_checkpoint(preset("tiny-v41", q_lora_rank=1 << 40), tmp_path / "x")
    with pytest.raises(MakeCheckpointError, match="o_groups"):
        make_checkpoint(preset("tiny-v41", o_groups=3), tmp_path / "x")
    with pytest.raises(MakeCheckpointError, match=r"tokenizer\.json"):
        make_checkpoint("tiny-v41", tmp_path / "x", tokenizer=tmp_path)
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    assert main(["--config", "tiny-v41", str(tmp_path / "full")]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "full" / "mine").read_text() == "kept"
    assert main(["--config", "tiny-v4", "--json", str(tmp_path / "small")]) == 0
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == 4883363


def test_configurations_that_cannot_work_are_refused() -> None:
    for changes, word in [
        ({"kv_source_layer_ids": [2, 3]}, "kv_source_layer_ids"),
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id"),
        ({"candidate_topk_blocks": 1}, "candidate blocks"),
        ({"index_source_layer_ids": [1, 5]}, "KV source"),
        ({"compress_ratios": [0, 3, 3, 1, 1, 1]}, "compress_ratios"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ]:
        with pytest.raises(UnsupportedModelError, match=word):
            read_deepseek_config(preset("tiny-v41", **changes))


@pytest.mark.parametrize("which", ["tiny_v41", "tiny_v4"])
def test_parts_are_cuts_of_the_whole(which: str, request: pytest.FixtureRequest) -> None:
    """Any rows and columns, on block edges or not, are the same cut of the reference's dequantised weight."""
    folder = request.getfixturevalue(which)
    checkpoint = open_folder(folder)
    config = read_deepseek_config(checkpoint.config)
    reader = Weights(checkpoint, config, Numerics.make(False, 32))
    oracle = read_weights(folder, config.weight_block)
    for name in ("layers.0.attn.wq_b", "layers.1.attn.wo_b", "layers.2.ffn.shared_experts.w2", "layers.2.attn.wo_a"):
        full = oracle[f"{name}.weight"]
        n, k = full.shape
        for rows, columns in [
            (None, None),
            (slice(0, n // 2), None),
            (slice(n // 4, n), slice(k // 2, k)),
            (slice(7, 45), slice(k // 4, k // 4 + 33)),
        ]:
            part = reader.fp8(name, rows=rows, columns=columns).decode().double().numpy()
            np.testing.assert_array_equal(part, full[rows or slice(None), columns or slice(None)])
    full = oracle["layers.2.ffn.experts.3.w2.weight"]
    part = reader.fp4("layers.2.ffn.experts.3.w2", columns=slice(32, 96)).decode().double().numpy()
    np.testing.assert_array_equal(part, full[:, 32:96])


def test_the_models_prefix_is_optional_and_missing_weights_are_named(tiny_v41: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {}
    for path in tiny_v41.glob("model-*.safetensors"):
        tensors |= load_file(str(path))
    gone = "layers.2.attn.wkv.scale"
    save_file({f"model.{n}": t for n, t in tensors.items() if n != gone}, str(tmp_path / "model.safetensors"))
    for name in ("config.json", "engram_token_map.safetensors"):
        (tmp_path / name).write_bytes((tiny_v41 / name).read_bytes())
    checkpoint = open_folder(tmp_path)
    reader = Weights(checkpoint, read_deepseek_config(checkpoint.config), Numerics.make(False, 32))
    assert torch.equal(reader.raw("norm.weight"), tensors["norm.weight"])
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.attn\.wkv\.scale"):
        reader.fp8("layers.2.attn.wkv")
