"""`lowlat bench` on a GPU: the read kernel, arms of steps, regions from records of kernels, parts inside one launch."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch
from family_kit import save_random
from spec_kit import VOCABULARY, random_draft, save_target

from lowlat.bench import regions
from lowlat.bench.arms.base import StepCase
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.presets import PRESETS, DenseShape, FolderShape, any_shape
from lowlat.bench.region_arms import build_region_arm
from lowlat.bench.results import problems
from lowlat.bench.step import StepOptions, run_step
from lowlat_plugin import discover

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
QWEN = msgspec.structs.replace(PRESETS["tiny"], name="tiny-qwen", qk_norm=True, architecture="Qwen3ForCausalLM")


def test_the_read_kernel_reads_everything():
    found = measure_ceiling("cuda", gigabytes=0.5, repeats=3)
    assert found.method.startswith("Triton")
    assert found.bytes == 500_000_000 // 4 // 65536 * 65536 * 4
    assert found.tb_s > 0


def test_every_arm_of_a_step(monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789")
    arms = ("general", "torch-eager-graph", "torch-compile", "transformers", "read-floor")
    options = StepOptions(
        model="tiny", arms=arms, rows=(1, 3), contexts=(100,), rounds=2, steps=4, device="cuda", dtype="bfloat16",
        ceiling_gb=0.5,
    )  # fmt: skip
    outcome = run_step(options, command="test")
    assert outcome.unavailable == {}
    assert {(row.arm, row.rows) for row in outcome.result.rows} == {(arm, rows) for arm in arms for rows in (1, 3)}
    assert all(row.samples == 16 for row in outcome.result.rows if row.arm != "read-floor")
    assert problems(outcome.result) == []


@pytest.mark.parametrize("shape", [PRESETS["tiny"], QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("name", ["general", "torch-eager-graph"])
def test_regions_of_a_captured_step(name, shape):
    case = StepCase(shape=shape, requests=3, context=50, dtype="bfloat16", device="cuda")
    arm = build_region_arm(name, case)
    times = regions.measure_regions(name, arm, 65)
    arm.close()
    assert len(times.steps) == len(times.bare_us) == 65
    counts = {region: len(spans) / 65 for region, spans in times.instances().items()}
    expected = {"layer": 2, "attention": 2, "mlp": 2, "head": 1, "other": 1}
    if name == "general":
        expected |= {"qkv": 2, "attention output": 2, "sample": 1}
        expected |= {"gate and up": 2, "down": 2}
        # Regions of their own where no kernel joins them with a product, or with attention.
        for fused in ("norm", "activation", "rotation and cache write"):
            counts.pop(fused, None)
    assert counts == expected
    for spans in times.steps:
        step = spans[-1]
        assert (step.name, step.start_us, step.depth) == ("other", 0.0, 0)
        assert sum(span.own_us for span in spans) == pytest.approx(step.end_us)
    assert 0 <= arm.details["tracing_us_per_kernel"] < 5


def measured_counts(case: StepCase) -> dict[str, float]:
    """Instances of each region in a step of the general path."""
    arm = build_region_arm("general", case)
    times = regions.measure_regions("general", arm, 65)
    arm.close()
    for spans in times.steps:
        assert sum(span.own_us for span in spans) == pytest.approx(spans[-1].end_us)
    return {region: len(spans) / 65 for region, spans in times.instances().items()}


@pytest.mark.parametrize("spec", ["dspark", "ngram"])
def test_regions_of_a_step_that_checks_guesses(spec, tmp_path):
    target = save_target(tmp_path / "target")
    draft = str(random_draft(tmp_path / "draft", spec)) if spec == "dspark" else None
    case = StepCase(
        shape=FolderShape("target", VOCABULARY, 160), context=40, dtype="bfloat16", device="cuda", model=str(target),
        spec=spec, draft=draft,
    )  # fmt: skip
    counts = measured_counts(case)
    expected = {"layer": 4, "attention": 4, "mlp": 4, "head": 1, "acceptance": 1, "other": 1}
    assert expected.items() <= counts.items()
    assert counts["proposals"] == (2 if spec == "dspark" else 1)


def test_regions_of_experts(tmp_path):
    save_random(
        tmp_path, "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, hidden_size=128,
        intermediate_size=128, head_dim=32,
    )  # fmt: skip
    case = StepCase(
        shape=any_shape(str(tmp_path)), context=40, dtype="bfloat16", device="cuda", model=str(tmp_path)
    )  # fmt: skip
    counts = measured_counts(case)
    assert {"layer": 3, "attention": 3, "router": 3, "experts": 3, "head": 1, "other": 1}.items() <= counts.items()


def test_a_step_of_several_models(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789")
    (tmp_path / "config.json").write_text(msgspec.json.encode(QWEN.config()).decode())
    arms = ("general", "torch-eager-graph", "torch-compile", "transformers")
    options = StepOptions(
        model=f"tiny,{tmp_path},deepseek-v41", arms=(*arms, "read-floor"), contexts=(100,), rounds=1, steps=2,
        device="cuda", dtype="bfloat16", ceiling_gb=0.5,
    )  # fmt: skip
    states = []
    outcome = run_step(options, command="test", measured=states.append)
    assert [len(state.result.rows) for state in states] == [4, 5, 9, 10, 11], "told behind each case and model"
    assert list(outcome.unavailable) == [f"{arm} of deepseek-v41" for arm in arms]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_parts_inside_the_dense_launch():
    plans = pytest.importorskip("lowlat_nvidia.dense.plan")
    pytest.importorskip("cuda.bindings")
    from lowlat_nvidia.dense.cases import make_case
    from lowlat_nvidia.dense.reference import random_weights
    from lowlat_nvidia.dense.rotary import frequencies, rotary_table
    from lowlat_nvidia.dense.stamps import ORDER, read_parts, stamped
    from lowlat_nvidia.dense.step import DenseStep

    shape = plans.DenseShape(4, 1024, 16, 8, 128, 3072, 5003, True, 1e-6)
    rotary = rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), 2000, "cuda")
    step = DenseStep(plans.DensePlan(shape), random_weights(shape, 11, "cuda"), rotary)
    inputs, pools = make_case(shape, [[900], [70]], 16, 4)
    step.bind(pools, 16)
    expected = step.run(inputs).clone()
    twin = stamped(step)
    for _ in range(3):  # the twin and the step may take turns
        step.logits_RV.fill_(float("nan"))
        assert torch.equal(twin.run(inputs), expected)
        assert torch.equal(step.run(inputs), expected)
    twin.run(inputs)
    step.check()
    parts = read_parts(twin.stamps)
    outer = [part for part in parts if part.depth == 1]
    assert [part.name for part in outer] == ["start", *["layer"] * 4, "head", "finish"]
    assert outer[0].start_us == 0
    assert all(before.end_us == after.start_us for before, after in pairwise(outer))
    assert all(part.end_us >= part.start_us for part in parts)
    inner = [part for part in parts if part.depth == 2]
    assert [part.name for part in inner] == list(dict.fromkeys(name for _, name, _ in ORDER)) * 4
    for layer in (part for part in outer if part.name == "layer"):
        inside = [part for part in inner if layer.start_us <= part.start_us < layer.end_us]
        length = sum(part.end_us - part.start_us for part in inside)
        assert length == pytest.approx(layer.end_us - layer.start_us)
    step.close()
    twin.close()


SMALL = DenseShape(
    name="small", layers=3, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=4001,
    qk_norm=True, tied=True, architecture="Qwen3ForCausalLM", max_context=2048, eps=1e-6,
)  # fmt: skip


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_regions_of_a_kernel_library_with_its_own_parts():
    if not any(candidate.distribution == "lowlat-nvidia" for candidate in discover().candidates):
        pytest.skip("lowlat-nvidia is not installed")
    case = StepCase(shape=SMALL, requests=2, context=300, dtype="bfloat16", device="cuda")
    arm = build_region_arm("lowlat-nvidia", case)
    times = regions.measure_regions("lowlat-nvidia", arm, 65)
    arm.close()
    counts = {region: len(spans) / 65 for region, spans in times.instances().items()}
    layer = {"qkv": 3, "attention": 3, "combine": 3, "attention output": 3, "gate and up": 3, "down": 3}
    assert layer.items() <= counts.items()
    assert (counts["kernels"], counts["layer"], counts["head"], counts["exchange"]) == (1, 3, 1, 15)
    for spans in times.steps:
        assert sum(span.own_us for span in spans) == pytest.approx(spans[-1].end_us)
    assert arm.details["parts_over_region"] > 0
