"""What a library promises before a device is needed: its declaration, and whom it refuses."""

from __future__ import annotations

from typing import Any

import msgspec

from lowlat_plugin import guard
from lowlat_plugin.conformance.case import load_case
from lowlat_plugin.conformance.trial import expect, host_of
from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.reasons import Code
from lowlat_plugin.registry import Candidate
from lowlat_plugin.spec import KernelSpec


def declaration(candidate: Candidate) -> str:
    """The spec survives JSON, promises numerics for logits and KV, and lists widths for every device."""
    spec = candidate.spec
    again = msgspec.json.decode(msgspec.json.encode(spec), type=KernelSpec)
    expect(again == spec, "the spec changes when written as JSON and read back")
    for output in ("logits", "kv"):
        expect(output in spec.numerics.bounds, f"numerics has no bound for {output}")
    expect(bool(spec.devices), "no devices are listed")
    return f"{len(spec.devices)} devices, modes {', '.join(sorted(spec.modes))}"


def refusals(candidate: Candidate) -> str:
    """Every fact that does not fit is refused by name, several at once are all listed, nothing crashes the guard."""
    facts = host_of(load_case(candidate.spec)).facts
    own = guard.check(candidate.spec, facts)
    expect(not own, f"the example itself is refused: {', '.join(map(str, own))}")
    wrong: dict[str, dict[str, Any]] = {
        Code.VENDOR: {"vendor": "no-such-vendor"},
        Code.ARCHITECTURE: {"architecture": "NoSuchForCausalLM"},
        Code.TENSOR_PARALLEL: {"tensor_parallel": 4099},
        Code.CAPABILITY: {"capabilities": {"a capability of the future": 1}},
        Code.CONTRACT_VERSION: {"contract": 1 << 20},
        Code.DEADLINE_TOO_SHORT: {"watchdog_s": 0.001},
    }
    if "*" not in candidate.spec.devices:
        wrong[Code.ISA] = {"isa": "no-such-isa"}
    if candidate.spec.requires.dtypes is not None:
        wrong[Code.DTYPE] = {"dtype": "no-such-dtype"}
    if candidate.spec.requires.weight_formats is not None:
        wrong[Code.WEIGHT_FORMAT] = {"weight_formats": frozenset({"no-such-format"})}
    if candidate.spec.requires.page_sizes is not None:
        wrong[Code.KV_LAYOUT] = {"page_size": 4099}
    for code, change in wrong.items():
        codes = _codes(candidate.spec, msgspec.structs.replace(facts, **change))
        expect(code in codes, f"{change} is not refused as {code}")
    early = {Code.VENDOR, Code.ARCHITECTURE, Code.ISA}
    all_at_once = {k: v for code, change in wrong.items() if code not in early for k, v in change.items()}
    codes = _codes(candidate.spec, msgspec.structs.replace(facts, **all_at_once))
    expect(set(wrong) - early <= codes, f"of several faults at once only {sorted(codes)} are listed")
    return f"{len(wrong)} faults, each named"


def _codes(spec: KernelSpec, facts: EngineFacts) -> set[str]:
    return {reason.code for reason in guard.check(spec, facts)}
