"""The draft that comes with lowlat, on the model's real weights: small, found by itself, and right often enough."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lowlat.engine.request import SamplingParams
from lowlat.engine.setup_error import SetupError
from lowlat.offline import Engine
from lowlat.speculative.draft_files import load_draft, shipped_draft

SETTINGS = {"model": "smollm2", "dtype": "float32", "threads": 1, "kv_tokens": 512, "max_batch": 1, "page_size": 16}
QUESTIONS = (
    "List five facts about the planet Mars and explain each of them.",
    "Write a Python function that reads a JSON file and returns the names in it.",
)


def test_it_is_small_and_has_a_card():
    folder = shipped_draft("smollm2", "dspark")
    assert folder is not None
    assert (Path(folder) / "model.safetensors").stat().st_size < 12e6
    config, weights = load_draft(Path(folder))
    assert (config.kind, config.vocab_size, config.num_target_layers) == ("dspark", 49152, 30)
    assert weights["draft_tokens"].diff().min() > 0
    card = (Path(folder) / "README.md").read_text()
    assert all(f"## {part}" in card for part in ("Data", "Recipe", "Acceptance"))
    assert shipped_draft("smollm2", "dflash") is None
    assert shipped_draft("../smollm2", "dspark") is None


def test_other_kinds_must_be_named():
    with pytest.raises(SetupError, match="--spec dflash needs --draft"):
        Engine(**SETTINGS, low_latency="off", spec="dflash")


@pytest.mark.skipif(importlib.util.find_spec("lowlat_cpu") is None, reason="lowlat-cpu is not installed")
def test_its_guesses_are_right_beside_kernels_that_show_their_states():
    """Kernels whose results do not depend on a step's rows, so answers are those of plain decoding, to the token."""
    kernels = {"low_latency": "require", "kernels": "lowlat-cpu"}
    with (
        Engine(**SETTINGS, **kernels) as plain,
        Engine(**SETTINGS, **kernels, spec="dspark", spec_width=7) as engine,
    ):
        assert engine.facts.kernels is not None
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = [plain.chat_ids(chat) for chat in chats]
        before = 0
        for temperature, least in ((0.0, 0.6), (0.8, 0.3)):
            for seed, prompt in enumerate(prompts):
                sampling = SamplingParams(max_tokens=32, temperature=temperature, seed=seed, ignore_eos=True)
                expected = plain.generate(prompt, sampling)
                assert engine.generate(prompt, sampling).token_ids == expected.token_ids
            stats = engine._core.stats()
            print(temperature, stats.accepted_tokens - before)
            assert stats.accepted_tokens - before > least * len(prompts) * 32 / (1 + least)
            before = stats.accepted_tokens
