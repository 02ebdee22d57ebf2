"""Kernel libraries in SGLang 0.5.23, unmodified: what it calls when it loads plugins, and what it gets.

A kernel library for NVIDIA adds this to its pyproject.toml, beside its `lowlat.kernels` entry point:

    [project.entry-points."sglang.srt.plugins"]
    nvidia_megakernel = "lowlat_plugin.hosts.sglang:register"

and for AMD the same under any other name. `sglang_specs` then makes SGLang's spec objects on demand.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from lowlat_plugin import guard
from lowlat_plugin.hosts.sglang_facts import FEATURES, config_facts
from lowlat_plugin.hosts.sglang_model import build_kernel, model_reasons, observe
from lowlat_plugin.reasons import Code, Reason, Refused
from lowlat_plugin.registry import Candidate, discover, implementation
from lowlat_plugin.spec import Metric, Mode

log = logging.getLogger("lowlat.plugins")
SPECS = "lowlat_plugin.hosts.sglang_specs"
API_VERSION = 1
_METRICS = {Metric.MAX_ABS: "max_abs", Metric.RELATIVE: "rel", Metric.COSINE: "cosine", Metric.BITWISE: "max_abs"}


def register() -> list[str]:
    """SGLang's plugin entry point: register every installed candidate for NVIDIA and AMD, one an architecture.

    `LOWLAT_KERNELS` names a library where several cover one architecture; without it the first in order is taken.
    Load errors are raised, so that SGLang's log shows them. Returns what was registered.
    """
    from sglang.kernels.plugin_kernels.amd import spec as amd
    from sglang.kernels.plugin_kernels.nvidia import spec as nvidia

    registry = discover()
    name = os.environ.get("LOWLAT_KERNELS")
    candidates = registry.named(name) if name else registry.candidates
    taken: dict[tuple[str, str], str] = {}
    for candidate in candidates:
        for architecture in sorted(candidate.spec.architectures):
            key = (candidate.spec.vendor, architecture)
            if candidate.spec.vendor not in ("nvidia", "amd") or key in taken:
                continue
            taken[key] = candidate.key
            path = f"{SPECS}:{attribute_of(candidate)}"
            if candidate.spec.vendor == "nvidia":
                nvidia.register(architecture=architecture, path=path)
            else:
                amd.register(backend=amd.BACKEND, architecture=architecture, path=path)
    if registry.failures:
        raise Refused("lowlat kernel libraries", [failure.reason for failure in registry.failures])
    return [f"{vendor} {architecture}: {key}" for (vendor, architecture), key in taken.items()]


def attribute_of(candidate: Candidate) -> str:
    """A name under which `sglang_specs` finds a candidate again, in any process."""
    return candidate.key.encode().hex()


def spec_for(attribute: str) -> Any:
    """SGLang's own spec object for a registered candidate. Raises AttributeError for an unknown one."""
    for candidate in discover().candidates:
        if attribute_of(candidate) == attribute:
            return nvidia_spec(candidate) if candidate.spec.vendor == "nvidia" else amd_spec(candidate)
    raise AttributeError(f"no installed kernel library answers to {attribute!r}")


def nvidia_spec(candidate: Candidate) -> Any:
    """A MegakernelSpec that says as much of ours as SGLang's can; the rest is in its hooks."""
    from sglang.kernels.plugin_kernels.nvidia import spec as nvidia

    spec = candidate.spec
    limits = spec.devices.values()
    requires = nvidia.Requirements(
        isas=frozenset(spec.devices),
        tp_sizes=frozenset(size for limit in limits for size in limit.tensor_parallel),
        resident_blocks=min((limit.resident_blocks for limit in limits), default=0),
        dtypes=spec.requires.dtypes or frozenset(),
        # A kernel that packs weights must not be built on the placeholders of an overlapped start.
        server_args={"startup_weight_load_mode": frozenset({"serial"})},
        hf_config=_exact_fields(candidate),
    )
    return nvidia.MegakernelSpec(
        name=candidate.key,
        requires=requires,
        features=_features(candidate, nvidia.Feature),
        numerics=_numerics(candidate, nvidia, "tolerances", "{output}.{metric}"),
        max_rows=max((width for limit in limits for width in limit.widths), default=0),
        build=lambda model, hf_config, context: _built(candidate, model, hf_config, context),
        api_version=API_VERSION,
        model_disable_reasons=lambda model, hf_config: _model_reasons(candidate, model, hf_config),
        config_disable_reasons=lambda cfg, hf_config: _config_reasons(candidate, cfg, hf_config),
    )


def amd_spec(candidate: Candidate) -> Any:
    """A MonoSpec, likewise."""
    from sglang.kernels.plugin_kernels.amd import spec as amd

    spec = candidate.spec
    devices = {
        isa: amd.DeviceLimits(tuple(sorted(limit.widths)), tuple(sorted(limit.tensor_parallel)), limit.resident_blocks)
        for isa, limit in spec.devices.items()
    }
    return amd.MonoSpec(
        name=candidate.key,
        devices=devices,
        features=_features(candidate, amd.Feature),
        requires=amd.Requirements(
            dtypes=spec.requires.dtypes or frozenset(),
            server_args={"startup_weight_load_mode": frozenset({"serial"})},
            hf_config=_exact_fields(candidate),
        ),
        numerics=_numerics(candidate, amd, "bounds", "step.{output}.{metric}"),
        model_disable_reasons=lambda model, hf_config, copies: _model_reasons(candidate, model, hf_config),
        build=lambda model, hf_config, context: _built(candidate, model, hf_config, context),
        api_version=API_VERSION,
        config_disable_reasons=lambda cfg, hf_config: _config_reasons(candidate, cfg, hf_config),
        load_tensor=_load_hook(candidate),
    )


# -- what SGLang's fields can say ------------------------------------------------------------------------------------


def _features(candidate: Candidate, features: Any) -> frozenset[Any]:
    accepted = {name for name in candidate.spec.accepts if name in FEATURES}
    found = {FEATURES[name] for name in accepted}
    if Mode.VERIFY in candidate.spec.modes:
        found |= {"SPECULATIVE_DECODING"}
    return frozenset(getattr(features, name) for name in found if hasattr(features, name))


def _exact_fields(candidate: Candidate) -> dict[str, Any]:
    """Conditions of a single value; the others are asked in `config_disable_reasons`."""
    return {
        name: condition.one_of[0]
        for name, condition in candidate.spec.requires.config.items()
        if condition.one_of is not None and len(condition.one_of) == 1 and condition.present
    }


def _numerics(candidate: Candidate, module: Any, field: str, form: str) -> Any:
    bounds = candidate.spec.numerics.bounds
    named = {form.format(output=o, metric=_METRICS[b.metric]): b.limit for o, b in bounds.items()}
    exact = all(bound.metric is Metric.BITWISE for bound in bounds.values())
    kind = module.NumericsKind.BITWISE if exact else module.NumericsKind.TOLERANCE
    return module.Numerics(kind=kind, **{field: named})


# -- hooks: never raise where SGLang would not catch -----------------------------------------------------------------


def _config_reasons(candidate: Candidate, cfg: Any, hf_config: Any) -> list[str]:
    return _listed(candidate, lambda: _new_to_sglang(candidate, cfg, hf_config))


def _new_to_sglang(candidate: Candidate, cfg: Any, hf_config: Any) -> list[Reason]:
    """Our guard's reasons, less those that SGLang's own fields have given already."""
    facts = config_facts(candidate.spec, cfg, hf_config)
    reasons = guard.check(candidate.spec, facts)
    if not reasons:
        reasons = guard.check_library(implementation(candidate.spec), facts)
    exact = {f"config {name}" for name in _exact_fields(candidate)}
    features = {f"engine capability {name}" for name in FEATURES}
    known = (Code.ISA, Code.DTYPE, Code.TENSOR_PARALLEL)
    return [r for r in reasons if r.code not in known and r.subject not in exact | features]


def _model_reasons(candidate: Candidate, model: Any, hf_config: Any) -> list[str]:
    return _listed(candidate, lambda: model_reasons(candidate, model, hf_config))


def _listed(candidate: Candidate, ask: Callable[[], list[Reason]]) -> list[str]:
    try:
        return [str(reason) for reason in ask()]
    except Refused as refusal:
        return [str(reason) for reason in refusal.reasons]
    except Exception as error:
        return [f"{candidate.key}: {type(error).__name__}: {error}"]


def _load_hook(candidate: Candidate) -> Callable[..., None] | None:
    from lowlat_plugin.kernel import Kernel, offers

    try:
        kernel = implementation(candidate.spec)
    except Refused:
        return None  # the guard names it
    if not offers(kernel, "observe_weight"):
        return None
    assert isinstance(kernel, Kernel)
    return lambda copies, model, name, tensor: observe(candidate, copies, model, name, tensor)


def _built(candidate: Candidate, model: Any, hf_config: Any, context: Any) -> Any:
    from lowlat_plugin.hosts.sglang_step import MegakernelSteps, MonokernelSteps

    kernel, plan, facts = build_kernel(candidate, model, hf_config, context)
    steps = MegakernelSteps if candidate.spec.vendor == "nvidia" else MonokernelSteps
    log.info("%s covers %s", candidate.key, ", ".join(map(str, sorted(plan.shapes))))
    return steps(candidate, kernel, plan, facts, model)
