"""From a configuration to the runner whose state lives on the device: on a CPU that says it is such a device."""

from __future__ import annotations

import logging

import pytest
import tokenizers
import torch
from family_kit import VOCABULARY, random_tokens, save_random

from lowlat.engine import build, device_build
from lowlat.engine.config import EngineConfig
from lowlat.engine.device_runner import DeviceRunner
from lowlat.offline import Engine, SamplingParams
from lowlat.platform import select
from lowlat.platform.cpu import CpuPlatform


class KeepingPlatform(CpuPlatform):
    keeps_state = True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_is_refused_with_a_reason_where_there_is_none():
    with pytest.raises(ValueError, match=r"--device cuda: PyTorch .* (without CUDA|no GPU).*; use --device cpu here"):
        select("cuda")
    with pytest.raises(build.SetupError, match="--device cuda"):
        build.build_engine(EngineConfig(device="cuda", max_context=64), lambda *_: None)


def test_unknown_devices_are_refused():
    with pytest.raises(ValueError, match="known: auto, cpu, cuda"):
        select("abacus")


def test_the_whole_engine_answers_as_on_a_cpu(monkeypatch, caplog, tmp_path):
    save_random(tmp_path, "Qwen3", head_dim=16)
    tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = random_tokens(20, 1)
    sampling = [SamplingParams(max_tokens=8, temperature=0), SamplingParams(max_tokens=8, temperature=0.8, seed=3)]
    settings = {"model": str(tmp_path), "max_batch": 3, "max_context": 64, "kv_tokens": 256, "low_latency": "off"}
    with Engine(EngineConfig(**settings)) as engine:
        expected = [engine.generate(prompt, one).token_ids for one in sampling]
    runners = []
    monkeypatch.setattr(build, "select", lambda device, rank: KeepingPlatform())
    original = build.prepare
    monkeypatch.setattr(build, "prepare", lambda runner, size: runners.append(runner) or original(runner, size))
    with Engine(EngineConfig(**settings)) as engine:
        assert [engine.generate(prompt, one).token_ids for one in sampling] == expected
        assert sum(count for _, _, count in engine.stats().low_latency_steps) >= 16, "steps are counted by who ran them"
    assert [type(runner) for runner in runners] == [DeviceRunner]
    assert not runners[0].fallbacks
    # What the device cannot do is done on the host, and said.
    monkeypatch.setattr(device_build, "Decoder", type("NoDecoder", (), {}))
    with caplog.at_level(logging.WARNING), Engine(EngineConfig(**settings)) as engine:
        assert engine.generate(prompt, sampling[0]).token_ids == expected[0]
    assert len(runners) == 1
    assert "has no forward for state on the device" in caplog.text
