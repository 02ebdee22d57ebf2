"""Guesses made and checked on the device, on a CPU that says it is such a device: answers are those without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from spec_kit import SETTINGS, crowd, random_draft, run_all, save_target

from lowlat.engine import build
from lowlat.engine.device_runner import DeviceRunner
from lowlat.offline import Engine
from lowlat.platform.cpu import CpuPlatform


class KeepingPlatform(CpuPlatform):
    keeps_state = True


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(build, "select", lambda device, rank=0: KeepingPlatform())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    with Engine(model=str(target), **SETTINGS) as engine:
        answers = run_all(engine, crowd())
        assert {len(answer) for answer in answers.values()} == {40}
        return answers


PROPOSERS = ["ngram", "draft-model", "dflash", "dflash2", "dspark"]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, dict]:
    """Settings by proposer. The small model is the target with some noise; the trained drafts are not trained."""
    folder = tmp_path_factory.mktemp("drafts")
    model = transformers.LlamaForCausalLM.from_pretrained(target)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    model.save_pretrained(folder / "small")
    shutil.copy(target / "tokenizer.json", folder / "small")
    drafts = {kind: str(random_draft(folder / kind, kind)) for kind in ("dflash", "dflash2", "dspark")}
    drafts["draft-model"] = str(folder / "small")
    return {"ngram": {"spec": "ngram"}} | {spec: {"spec": spec, "draft": path} for spec, path in drafts.items()}


def runner_of(engine: Engine) -> DeviceRunner:
    runner = engine._core.executor._runner
    assert isinstance(runner, DeviceRunner)
    assert runner.verifier is not None
    return runner


@pytest.mark.parametrize("width", [4, None])
@pytest.mark.parametrize("spec", PROPOSERS)
def test_answers_are_those_without(target: Path, expected: Any, options: dict, spec: str, width: int | None):
    """Chunked prefill, prefix hits, more requests than slots, and again with everything cached."""
    with Engine(model=str(target), spec_width=width, **options[spec], **SETTINGS | {"run_ahead": 2}) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        stats = engine._core.stats()
        assert stats.cached_tokens > 100
        assert not runner_of(engine).fallbacks
        assert not any(runner_of(engine)._flying)
        if width:
            assert stats.guessed_tokens > stats.accepted_tokens
            assert stats.guessed_tokens > (30 if spec == "ngram" else 200)
            if spec == "draft-model":
                assert stats.tokens_per_step > 1.2


@pytest.mark.parametrize("spec", PROPOSERS)
def test_a_small_pool_and_cancels_change_nothing(target: Path, expected: Any, options: dict, spec: str):
    settings = SETTINGS | {"kv_tokens": 200, "run_ahead": 2, "max_batch": 3}
    requests = crowd()
    late = [msgspec.structs.replace(request, priority=2) for request in requests[4:]]
    doomed = msgspec.structs.replace(requests[3], id="doomed")
    with Engine(model=str(target), spec_width=5, **options[spec], **settings) as engine:
        engine._core.submit(doomed)
        for _ in range(6):
            engine._core.turn(10)
        engine._core.abort("doomed")
        answers = run_all(engine, requests[:4], late)
        answers.pop("doomed", None)
        assert answers == expected
        assert engine._core.stats().preemptions > 0
