"""A tiny target, its plain answers, and a setting for every proposer: none of them may change an answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from spec_kit import SETTINGS, crowd, random_draft, run_all, save_target

from lowlat.offline import Engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    with Engine(model=str(target), **SETTINGS) as engine:
        answers = run_all(engine, crowd())
        assert {len(answer) for answer in answers.values()} == {40}
        return answers


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
