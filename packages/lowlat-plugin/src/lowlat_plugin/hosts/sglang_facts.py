"""What SGLang's resolved settings say, in the contract's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.spec import KernelSpec
from lowlat_plugin.version import BASIC_FEATURES

FEATURES = {
    "pipeline-parallel": "PIPELINE_PARALLEL",
    "multi-node": "MULTI_NODE_TP",
    "attention.data-parallel": "DP_ATTENTION",
    "expert-parallel": "EXPERT_PARALLEL",
    "expert-rebalancing": "EPLB",
    "context-parallel": "CONTEXT_PARALLEL",
    "speculative.verify": "SPECULATIVE_DECODING",
    "speculative.ragged": "RAGGED_VERIFY",
    "overlap-batches": "TWO_BATCH_OVERLAP",
    "lora": "LORA",
    "disaggregation": "PD_DISAGGREGATION",
    "routed-experts": "RETURN_ROUTED_EXPERTS",
    "kv-offload": "KV_OFFLOAD",
    "memory-release": "MEMORY_RELEASE",
    "cpu-offload": "CPU_OFFLOAD",
    "compile": "TORCH_COMPILE",
    "deterministic": "DETERMINISTIC_INFERENCE",
}
"""Capability to the name of SGLang's Feature: these SGLang probes itself."""


def _is(name: str, *quiet: object) -> Callable[[Any], bool]:
    return lambda cfg: getattr(cfg, name, None) not in (None, False, 0, "", *quiet)


PROBES: dict[str, Callable[[Any], bool]] = {
    "elastic-ranks": _is("elastic_ep_backend"),
    "hidden-states": _is("enable_return_hidden_states"),
    "kv-quantised": _is("kv_cache_dtype", "auto", "bfloat16", "bf16"),
    "layer-hooks": lambda cfg: _is("debug_tensor_dump_output_folder")(cfg) or _is("forward_hooks")(cfg),
    "multimodal": _is("enable_multimodal"),
    "sentinel-weights": _is("startup_weight_load_mode", "serial"),
}
"""What SGLang does not refuse by itself. A capability that nobody listed as accepted is refused by the guard."""


def config_facts(spec: KernelSpec, cfg: Any, hf_config: Any) -> EngineFacts:
    """Facts from the resolved settings, before weights. What SGLang probes itself is left to it."""
    from sglang.srt.kernel_plugins.nvidia import binding

    dtype = str(getattr(cfg, "dtype", "auto")).replace("torch.", "")
    kv_dtype = str(getattr(cfg, "kv_cache_dtype", "auto"))
    wanted = spec.requires.settings
    return model_facts(
        spec,
        hf_config,
        isa=binding.device_isa() or "none",
        tensor_parallel=int(getattr(cfg, "tp_size", 1)),
        dtype=_only(spec.requires.dtypes, dtype),
        kv_dtype=_only(spec.requires.kv_dtypes, dtype if kv_dtype == "auto" else kv_dtype),
        page_size=page_size_for(spec, int(getattr(cfg, "page_size", 1) or 1)),
        weight_formats=frozenset({str(getattr(cfg, "quantization", None) or "plain")}),
        capabilities={name: 1 for name, probe in PROBES.items() if probe(cfg)},
        settings={name: getattr(cfg, name) for name in wanted if hasattr(cfg, name)},
        watchdog_s=getattr(cfg, "watchdog_timeout", None) or None,
    )


def model_facts(spec: KernelSpec, hf_config: Any, **known: Any) -> EngineFacts:
    """Facts with what is known of the device filled in."""
    blocks, shared = _device_limits()
    config = hf_config.to_dict() if hasattr(hf_config, "to_dict") else dict(vars(hf_config))
    architectures = getattr(hf_config, "architectures", None) or ["(none)"]
    supported = [name for name in architectures if name in spec.architectures]
    return EngineFacts(
        architecture=(supported or architectures)[0],
        config=config,
        vendor=spec.vendor,
        resident_blocks=blocks,
        shared_memory=shared,
        features=BASIC_FEATURES | {"graphs", "communicator"},
        **known,
    )


def page_size_for(spec: KernelSpec, configured: int) -> int:
    """SGLang's table names a slot for each token, so it reads as pages of one as well as of its own size."""
    accepted = spec.requires.page_sizes
    return 1 if accepted is None or 1 in accepted else configured


def _only(accepted: frozenset[str] | None, found: str) -> str:
    """`auto` is resolved later by SGLang, which then checks it; until then it is taken to be what fits."""
    return min(accepted) if found == "auto" and accepted else found


def _device_limits() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.multi_processor_count, int(getattr(properties, "shared_memory_per_block_optin", 0))
