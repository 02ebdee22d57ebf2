"""What this engine tells kernel libraries about itself: model, device, formats, and what it is doing."""

from __future__ import annotations

import platform as machine
from typing import TYPE_CHECKING

import msgspec
import torch

import lowlat_plugin
from lowlat.engine.config import EngineConfig
from lowlat.platform import Platform

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

FEATURES = frozenset({"decode", "verify", "kv.paged", "kv.rebind"})


def engine_facts(
    config: EngineConfig, checkpoint: Checkpoint, platform: Platform, dtype: str
) -> lowlat_plugin.EngineFacts:
    """Facts for the guard. Reads the checkpoint's description, no weights."""
    vendor, isa, blocks, shared = _device(platform.device)
    return lowlat_plugin.EngineFacts(
        architecture=(checkpoint.config.get("architectures") or ["(none)"])[0],
        config=checkpoint.config,
        vendor=vendor,
        isa=isa,
        dtype=dtype,
        weight_formats=weight_formats(checkpoint),
        kv_dtype=dtype,
        page_size=config.page_size,
        tensor_parallel=config.tensor_parallel,
        resident_blocks=blocks,
        shared_memory=shared,
        capabilities=_capabilities(config.spec),
        settings=msgspec.to_builtins(config),
        features=FEATURES,
        watchdog_s=config.watchdog_s,
    )


def _capabilities(spec: str) -> dict[str, int]:
    """What kernels must be able to do beside plain decoding. Trained drafts look at states inside the model."""
    if spec == "off":
        return {}
    checks = {"speculative.verify": 1, "speculative.ragged": 1}
    return checks | {"hidden-states.taps": 1} if spec in ("dflash", "dflash2", "dspark") else checks


def weight_formats(checkpoint: Checkpoint) -> frozenset[str]:
    """`gguf.q4_1` and the like for a GGUF file, the quantisation's name for a quantised folder, else `plain`."""
    if checkpoint.source.kind == "gguf":
        tensors = checkpoint.source.gguf().file.tensors.values()
        return frozenset(f"gguf.{tensor.type.name.lower()}" for tensor in tensors)
    quantised = checkpoint.config.get("quantization_config") or {}
    return frozenset({str(quantised.get("quant_method", "plain"))})


def _device(device: torch.device) -> tuple[str, str, int, int]:
    """Vendor, instruction set, blocks that run at once (multiprocessors), shared memory a block in bytes."""
    if device.type != "cuda":
        return "cpu", machine.machine(), 0, 0
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    if torch.version.hip:
        return "amd", properties.gcnArchName.split(":")[0], properties.multi_processor_count, shared
    return "nvidia", f"sm_{properties.major}{properties.minor}", properties.multi_processor_count, shared
