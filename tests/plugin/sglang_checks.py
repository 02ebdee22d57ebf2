"""The SGLang adapter against the real wheel of sglang 0.5.23, without a GPU. Run by test_plugin_sglang.py in a
process of its own, with the wheel on the path; `sglang_site.py` says how it gets there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang_fakes import STATE, ForwardMode, Pool, Server, fake_device, hf_config, settings

# isort: split
# It has set up the packages that these are found in.
from sglang.kernels.plugin_kernels.amd import spec as amd_spec
from sglang.kernels.plugin_kernels.nvidia import spec as nvidia_spec
from sglang.srt import plugins
from sglang.srt.kernel_plugins.amd import binding as amd
from sglang.srt.kernel_plugins.nvidia import binding as nvidia
from sglang.srt.model_executor import forward_context

import lowlat_plugin.hosts.sglang as adapter
from lowlat_plugin.steps import LayerKV

sys.path.append(str(Path(__file__).parents[1] / "nvidia"))
from test_nvidia_dense_contract import StandIn

from lowlat_nvidia.dense import kernel as kernel_module
from lowlat_nvidia.dense.example import small_qwen3

LLAMA = ["LlamaForCausalLM"]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    fake_device(monkeypatch)


# -- registry --------------------------------------------------------------------------------------------------------


def test_sglang_discovers_and_registers_what_is_installed():
    found = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)
    entry = next(part for part in found["nvidia_megakernel"] if callable(part))
    assert entry() == [
        "nvidia BrokenForCausalLM: sglang-zoo/proberaisesonrank1",
        "amd LlamaForCausalLM: sglang-zoo/refreshingkernel",
        "amd Qwen3ForCausalLM: sglang-zoo/refreshingkernel",
        "nvidia LlamaForCausalLM: sglang-zoo/torchkernel",
        "nvidia Qwen3ForCausalLM: sglang-zoo/torchkernel",
    ]
    assert nvidia.plugin_reasons() == []
    assert "LlamaForCausalLM" in nvidia_spec.registered_architectures()
    spec, why = nvidia_spec.find_spec(architectures=LLAMA, isa="sm_90")
    assert (spec.name, why) == ("sglang-zoo/torchkernel", "")
    assert spec.max_rows == 4
    assert spec.requires.tp_sizes == {1, 2}
    assert spec.requires.hf_config == {"head_dim": 8}
    assert {feature.name for feature in spec.features} == {"SPECULATIVE_DECODING", "LORA"}
    assert spec.numerics.tolerances == {"logits.max_abs": 1e-4, "kv.rel": 1e-5}
    mono, why = amd_spec.find_spec(backend="amd", architectures=LLAMA, isa="gfx950")
    assert (mono.name, why) == ("sglang-zoo/refreshingkernel", "")
    assert mono.devices["gfx950"].widths == (1, 2, 3, 4)
    assert mono.numerics.bounds == {"step.logits.max_abs": 1e-4, "step.kv.rel": 1e-5}


def test_registering_twice_changes_nothing_and_a_name_chooses(monkeypatch):
    assert adapter.register() == adapter.register()
    monkeypatch.setenv("LOWLAT_KERNELS", "no-such-library")
    with pytest.raises(Exception, match="no-such-library"):
        adapter.register()
    monkeypatch.setenv("LOWLAT_KERNELS", "sglang-zoo/refreshingkernel")
    assert all(line.startswith("amd") for line in adapter.register())


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda m: m.setattr(adapter, "API_VERSION", 2), "uses megakernel API version 2"),
        (lambda m: m.setattr(adapter, "nvidia_spec", lambda c: 1 / 0), "does not import: ZeroDivisionError"),
        (lambda m: m.setattr(adapter, "nvidia_spec", lambda c: "spec"), "is not a MegakernelSpec"),
    ],
)
def test_sglangs_registry_reports_what_is_wrong(monkeypatch, break_it, said):
    adapter.register()
    break_it(monkeypatch)
    spec, why = nvidia_spec.find_spec(architectures=LLAMA, isa="sm_90")
    assert spec is None
    assert said in why


def test_other_devices_and_architectures_are_named():
    adapter.register()
    assert "not sm_103" in nvidia_spec.find_spec(architectures=LLAMA, isa="sm_103")[1]
    assert "no megakernel spec is registered" in nvidia_spec.find_spec(architectures=["Bert"], isa="sm_90")[1]
    assert "has no spec for" in amd_spec.find_spec(backend="amd", architectures=LLAMA, isa="gfx942")[1]


# -- guard -----------------------------------------------------------------------------------------------------------


def nvidia_reasons(hf=None, isa="sm_90", **changes):
    adapter.register()
    return nvidia.megakernel_disable_reasons(cfg=settings(**changes), hf_config=hf or hf_config(), isa=isa)[1]


def test_what_fits_has_no_reasons():
    assert nvidia_reasons() == []
    assert nvidia_reasons(enable_lora=True, speculative_algorithm="NGRAM", tp_size=2) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp_size": 2}, "pipeline parallelism is in use"),
        ({"nnodes": 2}, "multi-node tensor parallelism is in use"),
        ({"enable_dp_attention": True}, "DP attention is in use"),
        ({"ep_size": 2}, "expert parallelism is in use"),
        ({"enable_eplb": True}, "EPLB is in use"),
        ({"dcp_size": 2}, "context parallelism is in use"),
        ({"enable_two_batch_overlap": True}, "overlap is in use"),
        ({"disaggregation_mode": "decode"}, "PD disaggregation is in use"),
        ({"enable_return_routed_experts": True}, "routed-experts is in use"),
        ({"enable_return_indexer_topk": True}, "indexer-topk is in use"),
        ({"enable_hierarchical_cache": True}, "KV offload is in use"),
        ({"enable_hisparse": True}, "sparse attention is in use"),
        ({"enable_memory_saver": True}, "memory release is in use"),
        ({"cpu_offload_gb": 4}, "CPU offload is in use"),
        ({"enable_torch_compile": True}, "torch-compiled decode is in use"),
        ({"enable_deterministic_inference": True}, "deterministic inference is in use"),
        ({"tp_size": 8}, "tp_size 8 is not one of ['1', '2']"),
        ({"startup_weight_load_mode": "overlap"}, "startup_weight_load_mode 'overlap' is not one of"),
        ({"watchdog_timeout": 4}, "leaves the waits a deadline under"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "[capability] engine capability kv-quantised"),
        ({"enable_return_hidden_states": True}, "[capability] engine capability hidden-states"),
        ({"debug_tensor_dump_output_folder": "x"}, "[capability] engine capability layer-hooks"),
        ({"elastic_ep_backend": "mooncake"}, "[capability] engine capability elastic-ranks"),
    ],
)
def test_every_setting_that_does_not_fit_is_named(changes, said):
    reasons = nvidia_reasons(**changes)
    assert any(said in reason for reason in reasons), reasons


def test_model_fields_are_named_by_sglang_or_by_our_guard():
    assert "config.head_dim 64 is not 8" in nvidia_reasons(hf_config(head_dim=64))
    [ours] = nvidia_reasons(hf_config(intermediate_size=41))
    assert ours == "[config-field] config intermediate_size: found 41, wanted a multiple of 8"
    several = nvidia_reasons(hf_config(head_dim=64, intermediate_size=41), tp_size=8, pp_size=2)
    assert len(several) == 4


def test_dtype_gpu_plugin_and_both_flags():
    adapter.register()
    spec, _ = nvidia_spec.find_spec(architectures=LLAMA, isa="sm_90")
    assert "dtype 'bfloat16' is not one of" in nvidia._dtype_reasons(spec, SimpleNamespace(dtype=torch.bfloat16))[0]
    assert nvidia_reasons(isa=None) == ["no GPU is visible"]


def test_the_plugin_filter_is_named(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "something_else")
    assert "does not list" in nvidia.plugin_reasons()[0]


def test_a_guard_that_throws_is_a_reason(monkeypatch):
    adapter.register()
    monkeypatch.setattr(adapter, "config_facts", lambda *_: 1 / 0)
    assert any("ZeroDivisionError" in reason for reason in nvidia_reasons())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 8}, "tp_size 8 is not one of"),
        ({"ep_size": 2}, "expert parallelism is in use"),
        ({"enable_deterministic_inference": True}, "needs a BITWISE spec"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv-quantised"),
        ({}, None),
    ],
)
def test_amd_reasons(monkeypatch, changes, said):
    adapter.register()
    monkeypatch.setattr(amd, "attention_backends_of", lambda cfg: ("aiter", "aiter"))
    wide = SimpleNamespace(major=9, minor=4, multi_processor_count=256)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: wide)
    model_config = SimpleNamespace(hf_config=hf_config(), dtype=torch.float32)
    monkeypatch.setattr(nvidia, "device_isa", lambda: "gfx950")
    cfg = settings(**changes)
    reasons = amd.monokernel_disable_reasons(cfg=cfg, model_config=model_config, isa="gfx950")[1]
    assert reasons == [] if said is None else any(said in reason for reason in reasons), reasons


# -- install and dispatch --------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    adapter.register()
    found = Server()
    found.prefill()
    nvidia.install_megakernel(model=found.model, hf_config=found.config, capture_tail_hooks=found.hooks, is_draft=False)
    return found


def test_covered_steps_run_the_kernels_and_equal_the_models_own(server):
    built = nvidia.built_megakernel(server.model)
    assert built.widths == (1, 2, 3, 4)
    for requests in (1, 2, 3):
        batch = server.batch(ForwardMode.DECODE, requests, 5)
        found = server.run(batch)
        expected = server.general(batch.input_ids, batch.positions, batch)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert built.counters.snapshot() == {("plugin", "covered"): 3}


def test_other_steps_take_the_models_own_forward(server):
    built = nvidia.built_megakernel(server.model)
    server.run(server.batch(ForwardMode.EXTEND, 1, 5, rows=2))
    server.run(server.batch(ForwardMode.DECODE, 1, 5), input_embeds=torch.zeros(1))
    wants_hidden = server.batch(ForwardMode.DECODE, 1, 5)
    wants_hidden.capture_hidden_mode = SimpleNamespace(need_capture=lambda: True)
    server.run(wants_hidden)
    assert built.counters.snapshot() == {("general", "not-covered"): 1, ("general", "special-inputs"): 2} or (
        built.counters.snapshot() == {("general", "prefill"): 1, ("general", "special-inputs"): 2}
    )


def test_moved_pools_are_bound_again(server):
    batch = server.batch(ForwardMode.DECODE, 2, 5)
    server.run(batch)
    old = server.host.layers
    server.host.layers = tuple(LayerKV(x.k_SHD.clone(), x.v_SHD.clone()) for x in old)
    server.backend.token_to_kv_pool = Pool(server.host.layers)
    for layer in old:
        layer.k_SHD.fill_(float("nan"))
    found = server.run(batch)
    torch.testing.assert_close(found, server.general(batch.input_ids, batch.positions, batch), atol=1e-5, rtol=1e-5)


def test_verify_steps_with_two_rows_a_request(monkeypatch):
    STATE["speculative"] = SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=2)
    adapter.register()
    server = Server()
    server.prefill()
    nvidia.install_megakernel(model=server.model, hf_config=server.config, capture_tail_hooks=[], is_draft=False)
    batch = server.batch(ForwardMode.TARGET_VERIFY, 2, 5, rows=2)
    found = server.run(batch)
    torch.testing.assert_close(found, server.general(batch.input_ids, batch.positions, batch), atol=1e-5, rtol=1e-5)
    assert nvidia.built_megakernel(server.model).counters.snapshot() == {("plugin", "covered"): 1}


def test_sglangs_capture_check_sees_the_routed_sizes(server, caplog):
    STATE["capturing"] = True
    runner = SimpleNamespace(capture_bs=[1, 2, 3])
    with caplog.at_level("INFO"):
        for size in runner.capture_bs:
            batch = server.batch(ForwardMode.DECODE, size, 5)
            out = server.run(batch)
            with forward_context.forward_context(forward_context.ForwardContext(attn_backend=server.backend)):
                server.hooks[0](runner, out, batch, size)
    assert "runs the decode graphs of batch sizes [1, 2, 3] (3 of 3)" in caplog.text


def test_a_model_that_does_not_fit_is_refused_at_load():
    adapter.register()
    server = Server()
    with pytest.raises(ValueError, match="multiple of 8"):
        nvidia.install_megakernel(
            model=server.model,
            hf_config=hf_config(intermediate_size=41),
            capture_tail_hooks=[],
            is_draft=True,
        )


def test_amd_install_and_dispatch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0", raising=False)
    monkeypatch.setattr(nvidia, "device_isa", lambda: "gfx950")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(major=9, minor=4, multi_processor_count=256, gcnArchName="gfx950:sramecc+"),
    )
    adapter.register()
    server = Server()
    server.prefill()
    amd.install_monokernel_forward(model=server.model, hf_config=server.config, capture_tail_hooks=[])
    batch = server.batch(ForwardMode.DECODE, 2, 5)
    found = server.run(batch)
    torch.testing.assert_close(found, server.general(batch.input_ids, batch.positions, batch), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        server.run(server.batch(ForwardMode.EXTEND, 1, 5)),
        server.general(*(lambda b: (b.input_ids, b.positions, b))(server.batch(ForwardMode.EXTEND, 1, 5))),
    )


# -- the dense step, its launch replaced by the plain reference --------------------------------------------------------


@pytest.fixture
def dense(monkeypatch):
    """A small Qwen3 in SGLang's shape, and the library of this repository for it."""
    monkeypatch.setattr(kernel_module, "DenseStep", StandIn)
    STATE["library"] = "lowlat-nvidia"
    case = small_qwen3(0, "cpu")
    case.page_size = 1
    return Server(case=case)


def dense_reasons(hf, **changes):
    adapter.register()
    return nvidia.megakernel_disable_reasons(cfg=settings(**changes), hf_config=hf, isa="sm_90")[1]


def test_the_dense_step_is_registered_and_guarded(dense):
    architectures = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    assert adapter.register() == [f"nvidia {name}: lowlat-nvidia/dense-hopper" for name in sorted(architectures)]
    spec, why = nvidia_spec.find_spec(architectures=["Qwen3ForCausalLM"], isa="sm_90")
    assert (spec.name, why) == ("lowlat-nvidia/dense-hopper", "")
    assert spec.max_rows == 8
    assert spec.requires.resident_blocks == 128
    assert spec.requires.dtypes == {"bfloat16"}
    assert dense_reasons(dense.config) == []
    assert dense_reasons(dense.config, speculative_algorithm="NGRAM") == []
    assert any("tp_size 2 is not one of ['1']" in reason for reason in dense_reasons(dense.config, tp_size=2))
    wide = SimpleNamespace(**(dense.case.config | {"hidden_size": 5120}))
    assert any("config hidden_size" in reason for reason in dense_reasons(wide))
    assert "not sm_100" in nvidia_spec.find_spec(architectures=["Qwen3ForCausalLM"], isa="sm_100")[1]


def test_the_dense_step_computes_sglangs_decode_steps(dense):
    adapter.register()
    dense.prefill()
    nvidia.install_megakernel(model=dense.model, hf_config=dense.config, capture_tail_hooks=dense.hooks, is_draft=False)
    built = nvidia.built_megakernel(dense.model)
    assert built.widths == tuple(range(1, 9))
    before = StandIn.launches
    for requests in (1, 3):
        batch = dense.batch(ForwardMode.DECODE, requests, 5)
        found = dense.run(batch)
        expected = dense.general(batch.input_ids, batch.positions, batch)
        assert ((found - expected).norm(dim=1) < 2e-2 * expected.norm(dim=1)).all()
    assert StandIn.launches == before + 2
    assert StandIn.by_row == 2, "SGLang's own table is read, no copy of it is made"
    assert built.counters.snapshot() == {("plugin", "covered"): 2}


# -- two ranks -------------------------------------------------------------------------------------------------------


def rank_main(rank: int, folder: str, architecture: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=torch.distributed.group.WORLD)
    adapter.register()
    server = Server(architecture)
    parallel = SimpleNamespace(tp_size=2, tp_group=group)
    nvidia.get_parallel = lambda: parallel
    # Each rank holds a whole small model: what is under test is who agrees with whom.
    server.prefill()
    try:
        nvidia.install_megakernel(model=server.model, hf_config=server.config, capture_tail_hooks=[], is_draft=False)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}")
        return
    batch = server.batch(ForwardMode.DECODE, 2, 5)
    close = torch.allclose(server.run(batch), server.general(batch.input_ids, batch.positions, batch), atol=1e-5)
    print(f"rank {rank}: equal {close}")


@pytest.mark.parametrize(
    ("architecture", "said"), [("LlamaForCausalLM", "equal True"), ("BrokenForCausalLM", "rank 1 has no peer access")]
)
def test_two_gloo_ranks_agree_or_both_refuse(architecture, said, tmp_path):
    command = [sys.executable, __file__, str(tmp_path), architecture]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert all(said in output for output in outputs), outputs


if __name__ == "__main__":
    fake_device(pytest.MonkeyPatch())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank_main(int(sys.argv[3]), sys.argv[1], sys.argv[2])
