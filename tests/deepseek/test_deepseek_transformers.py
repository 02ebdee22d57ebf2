"""V4's text model against transformers' own, which reads the published names by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepseek_kit import Runner, load, open_folder, some_tokens
from dsv4_weights import read_weights
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers", "5.23")

_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}


@pytest.fixture(scope="module")
def oracle(tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    """transformers' model from the same weights, dequantised, under the published names."""
    config = open_folder(tiny_v4).config
    kept = {
        name: value
        for name, value in config.items()
        if name not in ("compress_ratios", "quantization_config", "expert_dtype", "rope_scaling", "architectures")
    }
    layers = config["num_hidden_layers"]
    settings = transformers.DeepseekV4Config(
        **kept,
        layer_types=[_KINDS[ratio] for ratio in config["compress_ratios"][:layers]],
        compress_rate_hca=16,
        rope_parameters=config["rope_scaling"],
    )
    folder = tmp_path_factory.mktemp("oracle")
    weights = {}
    for name, value in read_weights(tiny_v4, 128).items():
        weights[name] = torch.from_numpy(np.array(value)).to(torch.int64 if "tid2eid" in name else torch.float32)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    settings.architectures = ["DeepseekV4ForCausalLM"]
    settings.save_pretrained(folder)
    model, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"], report["missing_keys"]
    assert not report["unexpected_keys"], report["unexpected_keys"]
    # Scores of exactly zero tie often (ReLU); torch.topk breaks ties at will, this project to the lower entry.
    for name, module in model.named_modules():
        if name.endswith("indexer.scorer"):
            module.register_forward_hook(lambda _m, _a, scores: scores - 1e-6 * torch.arange(scores.shape[-1]))
    return model.eval()


@pytest.mark.parametrize("length", [5, 90])
def test_v4_equals_transformers(tiny_v4: Path, oracle: transformers.PreTrainedModel, length: int) -> None:
    tokens = some_tokens(length, seed=7)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0]
    logits = Runner(load(tiny_v4, quantised=False)).prefill(0, tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
