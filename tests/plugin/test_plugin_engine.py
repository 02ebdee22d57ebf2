"""Kernel libraries in lowlat's own engine, on the embedded model: the same oracle tokens with kernels, without them,
and after every broken library that was tried in the same engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers

from tiny_tokenizer import byte_tokenizer

pytest.importorskip("lowlat_cpu", reason="install examples/lowlat-cpu")
from broken_cpu_kernels import CASES, WaitsForEver, spec_of

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PlanLimits, StepPlan, decode_plan, encode_plan
from lowlat.engine.build import SetupError
from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine
from lowlat_plugin import LowLatency, Policy, Refused, Registry, State

ORACLE = json.loads((Path(__file__).parent.parent / "data/smollm2_135m_instruct_fp32_greedy.json").read_text())["cases"]
SETTINGS = {"model": "smollm2", "dtype": "float32", "threads": 1, "kv_tokens": 4096, "max_batch": 8}


@pytest.fixture(scope="module")
def general():
    """An engine whose own kernels are off; libraries are tried on its model and pool."""
    with Engine(**SETTINGS, low_latency="off") as engine:
        yield engine
        WaitsForEver.over.set()


@pytest.fixture(scope="module")
def fast():
    with Engine(**SETTINGS, low_latency="require") as engine:
        yield engine


def answers(engine: Engine, tokens: int = 8, cases=ORACLE[:1]) -> bool:
    """Whether greedy answers equal the oracle's up to the first margin under 0.01."""
    for case in cases:
        expected = case["output_ids"][:tokens]
        unsure = next((i for i, margin in enumerate(case["margins"][:tokens]) if margin < 0.01), tokens)
        found = engine.generate(
            case["input_ids"], SamplingParams(max_tokens=len(expected), temperature=0, ignore_eos=True)
        )
        if found.token_ids[:unsure] != expected[:unsure]:
            return False
    return True


def steps(engine: Engine) -> dict[tuple[str, str], int]:
    return {(path, reason): count for path, reason, count in engine._core.stats().low_latency_steps}


def test_oracles_with_kernels_alone_and_eight_together(fast):
    assert fast.facts.kernels == "lowlat-cpu/llama-gguf"
    before = steps(fast).get(("plugin", "covered"), 0)
    assert answers(fast, 30, ORACLE)
    cases = (ORACLE * 2)[:8]
    sampling = [SamplingParams(max_tokens=len(case["output_ids"]), temperature=0, ignore_eos=True) for case in cases]
    together = fast.generate([case["input_ids"] for case in cases], sampling)
    for case, found in zip(cases, together, strict=True):
        unsure = next((i for i, margin in enumerate(case["margins"]) if margin < 0.01), len(case["output_ids"]))
        assert found.token_ids[:unsure] == case["output_ids"][:unsure]
    assert steps(fast)["plugin", "covered"] - before > 100
    assert steps(fast)["general", "prefill"] >= 6


def test_long_prompts_continue_on_kernels(fast):
    cases = json.loads((Path(__file__).parent.parent / "data/smollm2_135m_instruct_fp32_greedy_long.json").read_text())
    before = steps(fast)["plugin", "covered"]
    assert answers(fast, 12, cases["cases"][:1])
    assert steps(fast)["plugin", "covered"] - before == 11


def test_the_switch_sends_steps_to_the_general_path_and_back(fast):
    low = fast._core.low_latency
    low.switch(False)
    before = steps(fast)
    assert answers(fast)
    assert steps(fast)["general", "switched-off"] - before.get(("general", "switched-off"), 0) >= 7
    assert steps(fast)["plugin", "covered"] == before["plugin", "covered"]
    low.switch(True)
    assert answers(fast)
    assert steps(fast)["plugin", "covered"] > before["plugin", "covered"]


def tried(engine: Engine, spec, policy: Policy = Policy.AUTO, deadline_s: float = 120.0) -> LowLatency:
    host = engine._core.low_latency.host
    registry = Registry()
    registry.register(spec, "broken")
    low = LowLatency(host, registry, policy)
    low.deadline_s = deadline_s
    low.choose()
    low.build()
    low.bind()
    low.prove(lengths=(2, 17))
    return low


@pytest.mark.parametrize(("spec", "code"), CASES, ids=[f"{spec.name}-{code}" for spec, code in CASES])
def test_every_broken_library_is_named_and_the_same_engine_answers_right(general, spec, code):
    low = tried(general, spec, deadline_s=0.2 if code == "deadline" else 120.0)
    if spec.name == "changesplan":
        low.recheck()
    if spec.name == "ignoresrebind":
        assert low.state is State.ACTIVE
        move_pool(general, low)
    report = low.report()
    reasons = [*report.reasons, *(r for c in report.candidates for r in c.reasons)]
    reasons += [reason for result in report.shadow for reason in result.reasons]
    assert code in {reason.code for reason in reasons}, report.lines()
    if spec.name == "outofbounds":
        assert low.state is State.ACTIVE
        assert report.disabled == {"decode/2x2": "shadow-miss"}
        with pytest.raises(Refused, match="max-abs"):
            tried(general, spec, Policy.REQUIRE)
    else:
        assert low.state is not State.ACTIVE
    runner(general).kernel_steps.low = low
    assert answers(general)


def runner(engine: Engine):
    return engine._core.executor.run.__self__


def move_pool(engine: Engine, low: LowLatency) -> None:
    """What a host does when it re-allocates: a new pool, and bind again."""
    old = runner(engine).kv
    new = KVPool(old.layout, old.keys[0].device)
    for before, after in zip(old.keys + old.values, new.keys + new.values, strict=True):
        after.copy_(before)
        before.fill_(float("nan"))
    runner(engine).kv = new
    low.host.use_pool(new)
    low.bind()
    low.prove(lengths=(2, 17))


def test_pools_that_move_without_bind_and_errors_in_a_step_fall_back_in_the_same_step(general):
    low = tried(general, spec_of("FailsLater"))
    assert low.state is State.ACTIVE
    low.kernel.served = 0
    runner(general).kernel_steps.low = low
    assert answers(general)
    assert low.counters.snapshot()["plugin", "covered"] == 3
    assert low.counters.snapshot()["general", "failed"] == 4
    assert "illegal address" in str(low.report().reasons[0])
    low = tried(general, spec_of("Works"))
    runner(general).kernel_steps.low = low
    low._seal = (1, 2, 3)
    assert answers(general)
    assert low.report().reasons[0].code == "pools-moved"


def test_a_library_that_is_required_and_missing_stops_the_start():
    with pytest.raises(SetupError, match="nosuch"):
        Engine(**SETTINGS, kernels="nosuch")
    with pytest.raises(SetupError, match="start with --dtype float32"):
        Engine(**(SETTINGS | {"dtype": "bfloat16"}), kernels="lowlat-cpu")


def test_reports_survive_json(fast):
    report = fast._core.low_latency.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_ranks_in_processes_of_their_own_refuse_together_and_serve(tmp_path, monkeypatch):
    """One rank's probe throws: both refuse by name, over the engine's own process group, and the answer is right."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_text(byte_tokenizer(101))
    info = tmp_path / "site/one_rank_breaks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one-rank-breaks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lowlat.kernels]\nbroken = one_rank_breaks:SPECS\n")
    (tmp_path / "site/one_rank_breaks.py").write_text(
        "import platform\nfrom lowlat_plugin import DeviceLimits\nfrom plugin_zoo import zoo_spec\n"
        "limits = DeviceLimits(frozenset({1, 2}), frozenset({1, 2}))\n"
        "SPECS = zoo_spec('ProbeRaisesOnRank1', devices={platform.machine(): limits})\n"
    )
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(here)]))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings = {"model": str(tmp_path / "model"), "dtype": "float32", "threads": 1, "kv_tokens": 64, "max_batch": 2}
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with Engine(**settings, low_latency="off") as engine:
        alone = engine.generate([1, 2, 3], sampling).token_ids
    with Engine(**settings, tensor_parallel=2) as engine:
        together = engine.generate([1, 2, 3], sampling).token_ids
        report = engine._core.low_latency.report()
    assert report.kernels == "one-rank-breaks/proberaisesonrank1"
    assert [(r.code, r.rank) for r in report.reasons] == [("raised", 1)]
    assert "no peer access" in report.reasons[0].found
    assert together == alone
    with pytest.raises(SetupError, match="rank 1"):
        Engine(**settings, tensor_parallel=2, low_latency="require")


@pytest.mark.parametrize("general", [False, True])
def test_the_switch_travels_in_the_plan_to_all_ranks(general):
    limits = PlanLimits(max_batch=4, max_rows=8, max_pages=4)
    record = np.full(limits.words, -1, np.int32)
    encode_plan(StepPlan(7, [], [], [], [0, 2], general), record, None)
    assert decode_plan(record, None) == StepPlan(7, [], [], [], [0, 2], general)


def test_guesses_are_checked_on_kernels(fast):
    """Verify steps, alone and with other requests beside, of different widths; answers stay the oracle's."""
    case = ORACLE[0]
    prompt = [*case["input_ids"], *case["output_ids"], *case["input_ids"]]
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=24, temperature=0.7, seed=3, ignore_eos=True)
    expected = fast.generate([prompt, prompt, case["input_ids"]], [sampling, drawn, sampling])
    with Engine(**SETTINGS, low_latency="require", spec="ngram", spec_width=4) as engine:
        assert engine.facts.kernels == "lowlat-cpu/llama-gguf"
        report = engine._core.low_latency.report()
        assert {"verify/1x4", "verify/2x7", "decode/1x1"} <= set(report.covered)
        before = steps(engine)
        found = engine.generate([prompt, prompt, case["input_ids"]], [sampling, drawn, sampling])
        assert [of.token_ids for of in found] == [of.token_ids for of in expected]
        assert answers(engine, 24)
        assert steps(engine)["plugin", "covered"] - before["plugin", "covered"] > 20
        stats = engine._core.stats()
        assert stats.accepted_tokens > 10
        assert stats.tokens_per_step > 1
        assert stats.break_even > 0.5
