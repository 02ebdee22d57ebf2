"""gpt-oss checkpoints keep experts as MXFP4 blocks: they are read as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from family_kit import ThreadRanks, build, check_one_request, save_random
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.parallel.group import Communicator

EXPERTS, HIDDEN, INTERMEDIATE = 3, 64, 96


def quantise_experts(path: Path, reference: torch.nn.Module) -> None:
    """Replace the experts of a saved model by random MXFP4 blocks, and those of `reference` by their values."""
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    for layer, module in enumerate(reference.model.layers):
        for name, outputs, inputs in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
            blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 126, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del weights[key]
            weights[f"{key}_blocks"], weights[f"{key}_scales"] = blocks, scales
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert values.abs().max() == 6 * 2.0**-2
            getattr(module.mlp.experts, name).data.copy_(values)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_mxfp4_experts_equal_transformers(tmp_path: Path):
    reference = save_random(
        tmp_path,
        "GptOss",
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=10,
        attn_implementation="eager",
    )
    quantise_experts(tmp_path, reference)
    assert "model.layers.0.mlp.experts.gate_up_proj_blocks" in open_checkpoint(tmp_path)
    check_one_request(reference, build(tmp_path))

    def work(communicator: Communicator) -> list[tuple[int, ...]]:
        mixture = build(tmp_path, communicator).layers[0].mlp
        return [tuple(mixture.experts.gate_up[0](torch.zeros(1, HIDDEN)).shape)]

    assert ThreadRanks(2).run(work) == [[(1, INTERMEDIATE)]] * 2
