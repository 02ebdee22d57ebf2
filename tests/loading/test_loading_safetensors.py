"""Folders of safetensors: whole and sharded, tied heads, parts of tensors, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.loading.errors import CheckpointError

EMBED, HEAD, MATRIX = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        EMBED: torch.randn(10, 4, generator=generator),
        MATRIX: torch.randn(8, 4, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.randn(4, generator=generator),
    }


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, shards: int = 1, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    tensors = weights() if tensors is None else tensors
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for n in range(shards):
        part = dict(list(tensors.items())[n::shards])
        name = f"model-{n:05}-of-{shards:05}.safetensors"
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_and_their_parts(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m", shards=shards))
    expected = weights()
    assert checkpoint.names() == sorted(expected)
    assert checkpoint.shape(MATRIX) == (8, 4)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.tensor(name).dtype == tensor.dtype
    matrix = expected[MATRIX].float()
    rows, columns = slice(2, 6), slice(1, 3)
    assert torch.equal(checkpoint.tensor(MATRIX, torch.float32, rows=rows), matrix[rows])
    assert torch.equal(checkpoint.tensor(MATRIX, torch.float32, columns=columns), matrix[:, columns])
    both = checkpoint.tensor(MATRIX, torch.float32, rows=rows, columns=columns)
    assert torch.equal(both, matrix[rows, columns])
    assert both.is_contiguous()
    assert torch.equal(checkpoint.tensor("model.norm.weight", rows=rows), expected["model.norm.weight"][rows])
    assert checkpoint.source.kind == "safetensors"


def test_a_tensor_is_a_copy(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m"))
    checkpoint.tensor(EMBED, torch.float32).zero_()
    assert torch.equal(checkpoint.tensor(EMBED, torch.float32), weights()[EMBED])


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
def test_tied_head(tmp_path: Path, config: dict[str, bool]) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m", **config))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert HEAD in checkpoint
    assert HEAD not in checkpoint.names()
    assert torch.equal(checkpoint.tensor(HEAD), weights()[EMBED])


def test_own_head(tmp_path: Path) -> None:
    head = torch.ones(10, 4)
    stored = weights() | {HEAD: head}
    for number, (config, expected) in enumerate([
        ({}, head), ({"tie_word_embeddings": False}, head), ({"tie_word_embeddings": True}, stored[EMBED]),
    ]):  # fmt: skip
        checkpoint = open_checkpoint(folder(tmp_path / str(number), stored, **config))
        assert torch.equal(checkpoint.tensor(HEAD), expected)
    missing = open_checkpoint(folder(tmp_path / "missing", tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        missing.tensor(HEAD)


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    first = open_checkpoint(path).fingerprint
    assert open_checkpoint(path).fingerprint == first
    folder(path, weights() | {"extra": torch.zeros(1)})
    assert open_checkpoint(path).fingerprint != first


def test_chat_template_and_generation_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    assert open_checkpoint(path).chat_template() is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(path).chat_template() == "D"
    (path / "chat_template.jinja").write_text("J")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(path)
    assert checkpoint.chat_template() == "J"
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        checkpoint.tokenizer()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no model 'nothing'.*smollm2"):
        open_checkpoint("nothing")
    path = tmp_path / "m"
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(path)
    (path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        open_checkpoint(path)
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(path)
    (path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickle.*safe_serialization"):
        open_checkpoint(path)
    (tmp_path / "file.txt").touch()
    with pytest.raises(CheckpointError, match="neither a folder"):
        open_checkpoint(tmp_path / "file.txt")


def test_damaged_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    file = path / "model.safetensors"
    data = file.read_bytes()
    for cut in (0, 5, 40, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(path)
    file.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        open_checkpoint(path)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="columns"):
        open_checkpoint(path).tensor("model.norm.weight", columns=slice(0, 1))


def test_damaged_shards(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", shards=3)
    index = path / "model.safetensors.index.json"
    good = index.read_text()
    (path / "model-00001-of-00003.safetensors").rename(path / "away")
    with pytest.raises(CheckpointError, match="1 of 3 shards are missing"):
        open_checkpoint(path)
    index.write_text(good.replace("model-00001", "../model-00001"))
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_checkpoint(path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="index of shards"):
        open_checkpoint(path)
