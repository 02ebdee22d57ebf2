"""All presets with all arms in one command: what cannot run is said, and never fatal."""

import json

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from lowlat.bench.cli import app
from lowlat.bench.presets import PRESETS
from lowlat.bench.results import load
from lowlat.bench.step import StepOptions, run_step

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = PRESETS["tiny"]
QWEN = msgspec.structs.replace(TINY, name="tiny-qwen", qk_norm=True, tied=True, architecture="Qwen3ForCausalLM")
ARMS = "general,lowlat-nvidia,torch-eager-graph,torch-compile,transformers,vllm,sglang,read-floor"


@pytest.fixture
def soon_compiled(monkeypatch):
    """torch.compile traces, guards and counts versions as always, and generates no code."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, backend="eager", **options))


@pytest.mark.usefixtures("soon_compiled")
def test_one_command_measures_every_model_with_every_arm_that_can_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789abcdef")
    config = tmp_path / "tiny-qwen"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(QWEN.config()))
    models = f"tiny,{config},deepseek-v41-tiny"
    arguments = ["--context", "16", "--rounds", "1", "--steps", "2", "--threads", "1", "--ceiling-gb", "0.01"]
    folder = tmp_path / "results"
    got = CliRunner().invoke(
        app, ["step", "--model", models, "--arms", ARMS, *arguments, "--save", "--results", str(folder)]
    )
    assert got.exit_code == 0, (got.output, got.exception)
    (path,) = folder.glob("step-presets-random-*.json")
    result = load(path)
    assert result.incomplete == ""
    dense = {"general", "torch-eager-graph", "torch-compile", "transformers", "read-floor"}
    found = {model: {row.arm for row in result.rows if row.workload == model} for model in ("tiny", "tiny-qwen")}
    assert found == {"tiny": dense, "tiny-qwen": dense}
    assert {row.arm for row in result.rows if row.workload == "deepseek-v41-tiny"} == {"general"}
    said = got.stderr
    for model in ("tiny", "tiny-qwen"):
        for arm in ("lowlat-nvidia", "vllm", "sglang"):
            assert f"{arm} of {model} was left out: " in said
        assert f"vllm of {model} was left out: vllm is not installed" in said
    for arm in ("torch-eager-graph", "torch-compile", "transformers"):
        assert f"{arm} of deepseek-v41-tiny was left out: only lowlat's own runner computes deepseek-v41-tiny" in said
    assert "read-floor of deepseek-v41-tiny was left out: nothing counts the bytes" in said


@pytest.mark.usefixtures("soon_compiled")
def test_more_cases_are_compiled_than_versions_of_a_function_are_allowed():
    limit = torch._dynamo.config.recompile_limit
    rows = tuple(range(1, limit + 3))
    outcome = run_step(
        StepOptions(
            model="tiny", arms=("torch-compile",), rows=rows, contexts=(8,), rounds=1, steps=1, warmup=0,
            ceiling_gb=0.01,
        )
    )  # fmt: skip
    assert outcome.unavailable == {}
    assert tuple(row.rows for row in outcome.result.rows) == rows
