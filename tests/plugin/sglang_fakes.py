"""SGLang without its server: the wheel's plugin modules, and around them a device, settings, models and batches.

To be imported before anything of `sglang`.
"""

from __future__ import annotations

import enum
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(os.environ["LOWLAT_SGLANG_SITE"]) / "sglang"
for name in ("sglang", "sglang.kernels", "sglang.srt"):
    # The packages' own __init__ import a whole server; what is under test lies below them and is the wheel's.
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package


@dataclass
class LogitsProcessorOutput:
    next_token_logits: torch.Tensor


sys.modules["sglang.srt.layers.logits_processor"] = types.ModuleType("logits_processor")
sys.modules["sglang.srt.layers.logits_processor"].LogitsProcessorOutput = LogitsProcessorOutput

from plugin_zoo import llama_weights, zoo_case  # noqa: E402
from sglang.kernels.plugin_kernels.amd import spec as amd_spec  # noqa: E402
from sglang.kernels.plugin_kernels.nvidia import spec as nvidia_spec  # noqa: E402
from sglang.srt.kernel_plugins.amd import binding as amd  # noqa: E402
from sglang.srt.kernel_plugins.nvidia import binding as nvidia  # noqa: E402
from sglang.srt.model_executor import forward_context  # noqa: E402

import lowlat_plugin.hosts.sglang as adapter  # noqa: E402
from lowlat_nvidia.specs import SPECS  # noqa: E402
from lowlat_plugin.conformance import ReferenceHost  # noqa: E402
from lowlat_plugin.registry import Registry, discover  # noqa: E402
from lowlat_plugin.spec import Mode  # noqa: E402
from lowlat_plugin.steps import StepInputs  # noqa: E402

OFF_SETTINGS = """
enable_dp_attention enable_eplb enable_prefill_cp enable_two_batch_overlap enable_single_batch_overlap enable_lora
enable_return_routed_experts enable_return_indexer_topk enable_hierarchical_cache enable_lmcache enable_flexkv
disaggregation_decode_enable_offload_kvcache enable_hisparse enable_memory_saver enable_weights_cpu_backup
enable_torch_compile enable_deterministic_inference
"""


class ForwardMode(enum.Enum):
    EXTEND = 1
    DECODE = 2
    TARGET_VERIFY = 3

    def is_decode(self):
        return self is ForwardMode.DECODE

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY


def hf_config(**changes):
    return SimpleNamespace(**(zoo_case().config | changes))


def settings(**changes):
    fields = dict.fromkeys(("speculative_algorithm", "lora_paths", "rl_on_policy_target", "dcp_size"))
    for name in OFF_SETTINGS.split():
        fields[name] = False
    for name in ("pp_size", "nnodes", "attn_dp_size", "ep_size", "attn_cp_size", "tp_size", "page_size"):
        fields[name] = 1
    fields |= {"cpu_offload_gb": 0, "offload_group_size": 0, "disaggregation_mode": "null", "watchdog_timeout": 300}
    fields |= {"dtype": "auto", "kv_cache_dtype": "auto", "quantization": None, "startup_weight_load_mode": "serial"}
    fields["cuda_graph_config"] = SimpleNamespace(decode=SimpleNamespace(backend="full", bs=[1, 2, 4]))
    return SimpleNamespace(**(fields | changes))


def fake_device(monkeypatch):
    """An SM90 with 132 multiprocessors, one rank, graphs on; and empty registries."""
    props = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448, gcnArchName="gfx950:xnack-"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: props)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: STATE["capturing"])
    parallel = SimpleNamespace(tp_size=1, tp_group=SimpleNamespace(world_size=1, rank_in_group=0))
    graph = SimpleNamespace(decode=SimpleNamespace(backend="full", bs=[1, 2, 4]))
    runtime = SimpleNamespace(
        kernel=SimpleNamespace(enable_nvidia_megakernel=True, enable_amd_monokernel=True),
        graph=SimpleNamespace(cuda_graph_config=graph),
    )
    for module in (nvidia, amd):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
        monkeypatch.setattr(module, "get_exec", lambda: runtime)
        monkeypatch.setattr(module, "get_spec", lambda: STATE["speculative"])
        monkeypatch.setattr(module, "get_device", lambda: SimpleNamespace(watchdog_timeout=300))
    monkeypatch.setattr(nvidia, "megakernel_enabled", lambda: True)
    monkeypatch.setattr(amd, "_backend", lambda: "amd")
    monkeypatch.setattr(adapter, "discover", lambda: only(STATE["library"]))
    monkeypatch.setattr(nvidia_spec, "_REGISTRY", {})
    monkeypatch.setattr(amd_spec, "_REGISTRY", {})
    STATE.update(library="sglang-zoo", capturing=False, speculative=SimpleNamespace(speculative_algorithm=None))


STATE: dict = {}


def only(distribution):
    """What is installed, of one distribution: others on this machine are no matter of these checks."""
    registry = Registry()
    for candidate in discover().candidates:
        if candidate.distribution == distribution:
            registry.register(candidate.spec, distribution, candidate.version)
    if distribution == "lowlat-nvidia":
        for spec in SPECS:
            registry.register(spec, distribution)
    return registry


class FusedModel(torch.nn.Module):
    """A Llama with SGLang's fused matrices and forward; it computes with the reference engine."""

    def __init__(self, weights, config):
        super().__init__()
        self.reference = None
        fused = {}
        for name, tensor in weights.items():
            for parts, whole in (
                (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
                (("gate_proj", "up_proj"), "gate_up_proj"),
            ):
                if any(part in name for part in parts):
                    names = [name.replace(next(p for p in parts if p in name), part) for part in parts]
                    fused[names[0].replace(parts[0], whole)] = torch.cat([weights[n] for n in names])
                    break
            else:
                fused[name] = tensor
        for name, tensor in fused.items():
            self.add(name.split("."), tensor)

    def add(self, path, tensor):
        module = self
        for part in path[:-1]:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(path[-1], torch.nn.Parameter(tensor.clone(), requires_grad=False))

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        return LogitsProcessorOutput(self.reference(input_ids, positions, forward_batch))


class Pool:
    """SGLang's pool of keys and values, as far as a kernel library sees it."""

    start_layer = 0

    def __init__(self, layers):
        self.layers = layers

    def get_kv_buffer(self, layer):
        return self.layers[layer].k_SHD, self.layers[layer].v_SHD


class Server:
    """A model, its pool, and forward batches for it."""

    def __init__(self, architecture="LlamaForCausalLM", case=None):
        self.case = case or zoo_case(page_size=1)
        self.config = hf_config(architectures=[architecture])
        if case is not None:
            self.config = SimpleNamespace(**case.config)
        weights = llama_weights(self.case.config, 0) if case is None else case.weights
        self.model = FusedModel(weights, self.case.config)
        self.host = ReferenceHost(self.case, pages=64)
        self.model.reference = lambda ids, positions, batch: self.general(ids, positions, batch)
        self.req_to_token = torch.randperm(60)[:60].reshape(3, 20).int() + 1
        self.backend = SimpleNamespace(
            token_to_kv_pool=Pool(self.host.layers),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            forward_metadata=None,
        )
        self.hooks = []

    def general(self, ids, positions, batch):
        rows = len(ids) // batch.batch_size
        lengths = batch.seq_lens + (rows if batch.forward_mode.is_target_verify() else 0)
        step = StepInputs(
            Mode.DECODE,
            ids,
            positions,
            torch.arange(0, len(ids) + 1, rows, dtype=torch.int32),
            lengths.int(),
            self.req_to_token[batch.req_pool_indices],
            batch.out_cache_loc.long(),
        )
        return self.host.general(step).logits_RV

    def batch(self, mode, requests, length, rows=1):
        """Requests 0 to `requests` - 1, each `length` long and `rows` rows further in this step."""
        verify = mode is not ForwardMode.DECODE
        indices = torch.arange(requests)
        positions = (torch.arange(length, length + rows)).repeat(requests)
        slots = self.req_to_token[indices][:, length : length + rows].reshape(-1)
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=requests,
            req_pool_indices=indices,
            seq_lens=torch.full((requests,), length if verify else length + 1),
            out_cache_loc=slots,
            capture_hidden_mode=None,
            input_embeds=None,
        )
        batch.input_ids = (torch.arange(requests * rows) * 7 + length) % self.case.config["vocab_size"]
        batch.positions = positions
        return batch

    def run(self, batch, **more):
        with forward_context.forward_context(forward_context.ForwardContext(attn_backend=self.backend)):
            return self.model.forward(batch.input_ids, batch.positions, batch, **more).next_token_logits

    def prefill(self):
        for position in range(5):
            self.run(self.batch(ForwardMode.EXTEND, 3, position))
