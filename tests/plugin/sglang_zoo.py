"""Kernel libraries as SGLang would find them: one for NVIDIA, one for AMD, and one for an architecture nobody has."""

from __future__ import annotations

from plugin_zoo import WIDTHS, zoo_spec

from lowlat_plugin import Condition, DeviceLimits, Requirements

REQUIRES = Requirements(
    dtypes=frozenset({"float32"}),
    config={"head_dim": Condition(one_of=(8,)), "intermediate_size": Condition(multiple_of=8)},
)
COMMON = {"requires": REQUIRES, "min_deadline_s": 0.1, "accepts": {"speculative.verify": 1, "lora": 1}}
NVIDIA_LIMITS = DeviceLimits(WIDTHS, frozenset({1, 2}), resident_blocks=100)

NVIDIA = zoo_spec("TorchKernel", vendor="nvidia", devices={"sm_90": NVIDIA_LIMITS}, **COMMON)
AMD = zoo_spec(
    "RefreshingKernel", vendor="amd", devices={"gfx950": DeviceLimits(WIDTHS, frozenset({1, 2}), 200)}, **COMMON
)
BROKEN = zoo_spec(
    "ProbeRaisesOnRank1",
    vendor="nvidia",
    devices={"sm_90": NVIDIA_LIMITS},
    **COMMON | {"architectures": frozenset({"BrokenForCausalLM"})},
)
SPECS = (NVIDIA, AMD, BROKEN)
