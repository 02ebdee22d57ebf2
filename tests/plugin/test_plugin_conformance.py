"""The conformance kit passes what works and fails what does not, check by check; also as a pytest plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plugin_meeting import meeting_case
from plugin_zoo import candidate, llama_weights, zoo_case

from lowlat_plugin import Registry
from lowlat_plugin.conformance import CHECKS, ReferenceHost, run_check, run_checks
from lowlat_plugin.spec import Mode, Requirements
from lowlat_plugin.steps import StepInputs


@pytest.mark.parametrize("kernel", ["TorchKernel", "RefreshingKernel"])
def test_working_kernels_pass_every_check(kernel):
    results = {result.check: result for result in run_checks(candidate(kernel))}
    assert set(results) == set(CHECKS)
    assert {r.check for r in results.values() if r.status == "skipped"} == {"deadline", "precision"}
    failed = [r for r in results.values() if r.status == "failed"]
    assert not failed, failed
    assert "logits" in results["outputs"].detail


@pytest.mark.parametrize(("kernel", "status"), [("TorchKernel", "passed"), ("Coarse", "failed")])
def test_kernels_in_16_bits_are_no_farther_from_float32_than_the_general_path(kernel, status):
    """The zoo's kernels compute in float32 on a cache in bfloat16; one rounds its logits to a few bits."""
    requires = Requirements(dtypes=frozenset({"bfloat16"}))
    result = run_check(candidate(kernel, example="plugin_zoo:narrow_case", requires=requires), "precision")
    assert result.status == status, result
    assert "from float32, the general path" in result.detail


def test_two_ranks_that_wait_for_one_another_meet_their_deadline():
    spec = meeting_case().spec
    registry = Registry()
    registry.register(spec, "zoo")
    result = run_check(registry.candidates[0], "deadline")
    assert result.status == "passed", result.detail


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        ("NeverRight", "outputs"),
        ("WrongSlot", "outputs"),
        ("IgnoresRebind", "rebinding"),
        ("RaisesInConstructor", "weights"),
        ("BrokenRefresh", "updates"),
        ("KeepsOldTokens", "replay"),
        ("ForgetsWeights", "weights"),
    ],
)
def test_broken_kernels_fail_the_check_that_is_for_them(kernel, check):
    result = run_check(candidate(kernel), check)
    assert result.status == "failed", result
    assert result.detail


def test_a_spec_without_an_example_says_what_to_add():
    result = run_check(candidate(example=""), "outputs")
    assert result.status == "failed"
    assert "KernelSpec.example" in result.detail


def test_as_a_pytest_plugin(tmp_path):
    here = Path(__file__).parent
    info = tmp_path / "zoo_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lowlat.kernels]\nzoo = zoo_specs:SPECS\n")
    (tmp_path / "zoo_specs.py").write_text(
        "from plugin_zoo import zoo_spec\nSPECS = [zoo_spec('TorchKernel'), zoo_spec('NeverRight')]\n"
    )
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(here), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--lowlat-kernels", "zoo-kernels"]
    if not _pytest_plugin_installed():
        command += ["-p", "lowlat_plugin.conformance.pytest_plugin"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert "zoo-kernels/neverright[outputs]" in done.stdout
    assert "zoo-kernels/torchkernel[outputs]" not in done.stdout
    assert "skipped" in done.stdout
    assert "passed" in done.stdout


def _pytest_plugin_installed() -> bool:
    from importlib import metadata

    return any(p.name == "lowlat_plugin" for p in metadata.entry_points(group="pytest11"))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_reference_engine_equals_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    case = zoo_case()
    config = case.config | {"architectures": [architecture], "num_key_value_heads": 1, "max_position_embeddings": 128}
    torch.manual_seed(1)
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        **{k: v for k, v in config.items() if k not in ("architectures", "rope_theta")},
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )
    model = getattr(transformers, architecture)(made).eval().float()
    case.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in case.weights.items():
        if name.endswith("bias"):
            tensor.normal_()
    model.load_state_dict(case.weights)
    case.config = config
    host = ReferenceHost(case)
    tokens = torch.randint(0, case.config["vocab_size"], (11,))
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    found = [host.general(_step(tokens, 0, 7)).logits_RV]
    found += [host.general(_step(tokens, p, p + 1)).logits_RV for p in range(7, 11)]
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)


def _step(tokens: torch.Tensor, start: int, end: int) -> StepInputs:
    positions = torch.arange(start, end)
    table = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    return StepInputs(
        Mode.PREFILL if end - start > 1 else Mode.DECODE,
        tokens[start:end],
        positions,
        torch.tensor([0, end - start], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        table,
        table[0].long()[positions // 4] * 4 + positions % 4,
    )


def test_weights_of_the_zoo_depend_on_the_seed():
    config = zoo_case().config
    a, b = llama_weights(config, 0), llama_weights(config, 1)
    assert all(not torch.equal(a[name], b[name]) for name in a)
