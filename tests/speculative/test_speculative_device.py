"""Guesses made and checked on the device, on a CPU that says it is such a device: answers are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from spec_kit import PROPOSERS, SETTINGS, VOCABULARY, broken_draft, crowd, random_draft, run_all

from lowlat.engine import build
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine
from lowlat.platform.cpu import CpuPlatform
from lowlat.speculative import int8_linear
from tiny_tokenizer import byte_tokenizer


class KeepingPlatform(CpuPlatform):
    keeps_state = True


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(build, "select", lambda device, rank=0: KeepingPlatform())


def runner_of(engine: Engine) -> DeviceRunner:
    runner = engine._core.executor._runner
    assert isinstance(runner, DeviceRunner)
    assert runner.verifier is not None
    return runner


@pytest.mark.parametrize(
    ("spec", "width"), [*((spec, 4) for spec in PROPOSERS), ("ngram", None), ("dspark", None), ("draft-model", None)]
)
def test_answers_are_those_without(target: Path, expected: Any, options: dict, spec: str, width: int | None):
    """Chunked prefill, prefix hits, more requests than slots, and again with everything cached."""
    with Engine(model=str(target), spec_width=width, **options[spec], **SETTINGS | {"run_ahead": 2}) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        stats = engine._core.stats()
        assert stats.cached_tokens > 100
        assert not runner_of(engine).fallbacks
        assert not any(runner_of(engine)._slots.flying)
        if width:
            assert stats.guessed_tokens > stats.accepted_tokens
            assert stats.guessed_tokens > (30 if spec == "ngram" else 200)
            if spec == "draft-model":
                assert stats.tokens_per_step > 1.2


@pytest.mark.parametrize("spec", ["dspark", "dflash2"])
def test_a_draft_without_numbers_changes_nothing(target: Path, expected: Any, tmp_path: Path, spec: str):
    draft = str(broken_draft(tmp_path, spec))
    with Engine(model=str(target), spec=spec, draft=draft, spec_width=4, **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().guessed_tokens > 200


@pytest.mark.parametrize("spec", ["ngram", "draft-model", "dspark"])
def test_a_small_pool_and_cancels_change_nothing(target: Path, expected: Any, options: dict, spec: str):
    settings = SETTINGS | {"kv_tokens": 200, "run_ahead": 2, "max_batch": 3}
    requests = crowd()
    late = [msgspec.structs.replace(request, priority=2) for request in requests[4:]]
    doomed = msgspec.structs.replace(requests[3], id="doomed")
    with Engine(model=str(target), spec_width=5, **options[spec], **settings) as engine:
        engine._core.submit(doomed)
        for _ in range(6):
            engine._core.turn()
        engine._core.abort("doomed")
        answers = run_all(engine, requests[:4], late)
        answers.pop("doomed", None)
        assert answers == expected
        assert engine._core.stats().preemptions > 0


def guesses_on_host(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """[length, guesses ...] of every step of an engine whose host makes guesses."""
    proposer = engine._core.executor.run.__self__.speculation._proposer
    seen: list[list[int]] = []
    propose = proposer.propose

    def recorded(requests):
        found = propose(requests)
        seen.extend([request.length, *of.tokens[:3]] for request, of in zip(requests, found, strict=True))
        return found

    proposer.propose = recorded
    engine.generate(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    return seen


def guesses_on_device(engine: Engine, prompt: list[int]) -> list[list[int]]:
    draft, tables = runner_of(engine).verifier.speculation.draft, runner_of(engine).tables
    seen: list[list[int]] = []
    propose = draft.propose

    def recorded(slots_B, *others):
        lengths_B = tables.lengths_T[slots_B].tolist()
        guesses_BG, counts_B = propose(slots_B, *others)
        known = lengths_B if counts_B is None else counts_B.tolist()
        rows = zip(lengths_B, guesses_BG.tolist(), known, strict=True)
        seen.extend([length, *row[:3]] for length, row, count in rows if count)
        return guesses_BG, counts_B

    draft.propose = recorded
    engine.generate(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    return seen


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dflash", {"sliding_window": 7}),
        ("dflash2", {}),
        ("dspark", {}),
        ("dspark", {"sliding_window": 9, "draft_vocab_size": 60}),
        ("ngram", {}),
    ],
)
def test_a_draft_guesses_on_the_device_what_it_guesses_on_the_host(target, tmp_path, monkeypatch, kind, changes):
    draft = None if kind == "ngram" else str(random_draft(tmp_path / kind, kind, **changes))
    prompt = [(7 * k) % VOCABULARY for k in range(19)]
    settings = {"model": str(target), "spec": kind, "draft": draft, "spec_width": 4, **SETTINGS, "run_ahead": 0}
    with Engine(**settings) as engine:
        mine = guesses_on_device(engine, prompt)
    monkeypatch.setattr(build, "select", lambda device, rank=0: CpuPlatform())
    monkeypatch.setattr(int8_linear, "available", lambda: False)  # which would change guesses a little
    with Engine(**settings) as engine:
        theirs = guesses_on_host(engine, prompt)
    # Near its end a request is guessed fewer tokens on the host.
    whole = [row for row in theirs if len(row) == 4 and row[0] < 19 + 26]
    assert len(whole) > 10
    assert [row for row in mine if row[0] < 19 + 26] == whole


def test_simulated_acceptance_is_exact(target: Path):
    settings = SETTINGS | {"spec": "ngram", "spec_width": 6, "spec_simulate_acceptance": 3.51}
    with Engine(model=str(target), **settings) as engine:
        sampling = SamplingParams(max_tokens=140, temperature=0, ignore_eos=True, logprobs=1)
        first = engine.generate([5, 6, 7], sampling)
        assert len(first.token_ids) == len(first.logprobs) == 140
        report = engine.speculation()
        assert report.simulated_acceptance == 3.51
        assert report.tokens_per_step == pytest.approx(3.51, abs=0.1)
        assert report.break_even > 0
        assert runner_of(engine).verifier is not None


@pytest.mark.parametrize("spec", ["ngram", "dspark"])
def test_a_target_with_windows_answers_the_same(options: dict, tmp_path: Path, spec: str):
    """Layers with a window have pages of their own; guesses and prefix hits cross their edges."""
    torch.manual_seed(6)
    config = transformers.Gemma3TextConfig(
        hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=160, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.3,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    with Engine(model=str(tmp_path), **SETTINGS) as engine:
        expected = run_all(engine, crowd())
    with Engine(model=str(tmp_path), spec_width=4, **options[spec], **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().guessed_tokens > 100
        assert not runner_of(engine).fallbacks
