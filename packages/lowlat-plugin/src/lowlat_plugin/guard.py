"""The guard: every reason why a set of kernels does not fit, all at once. Nothing crashes it.

`check` needs no weights and no device; `check_model` asks the implementation about the loaded model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from lowlat_plugin.facts import EngineFacts, deadline_for
from lowlat_plugin.kernel import BuildContext, Kernel, Plan
from lowlat_plugin.reasons import Code, Reason, raised
from lowlat_plugin.spec import Condition, KernelSpec, Mode


def check(spec: KernelSpec, facts: EngineFacts) -> list[Reason]:
    """Reasons from the declaration alone. Vendor or architecture mismatch ends the search: the rest would be noise."""
    for_this = list(_collect(spec.name, (_contract, _identity), spec, facts))
    if any(reason.code in (Code.VENDOR, Code.ARCHITECTURE) for reason in for_this):
        return for_this
    rest = (_device, _formats, _conditions, _capabilities, _coverage, _deadline)
    return for_this + list(_collect(spec.name, rest, spec, facts))


def check_library(kernel: Kernel, facts: EngineFacts) -> list[Reason]:
    """The implementation's own reasons about the configuration."""
    return _asked(kernel.spec.name, "config_reasons", lambda: kernel.config_reasons(facts))


def check_model(kernel: Kernel, context: BuildContext) -> list[Reason]:
    """The implementation's own reasons about the loaded model."""
    return _asked(kernel.spec.name, "model_reasons", lambda: kernel.model_reasons(context))


def check_plan(spec: KernelSpec, plan: object, context: BuildContext) -> list[Reason]:
    """What is wrong with a plan on its face: nothing covered, more than was declared, shapes that cannot be."""
    if not isinstance(plan, Plan):
        return [Reason(Code.BAD_PLAN, "probe", type(plan).__name__, "lowlat_plugin.Plan")]
    if not plan.shapes:
        return [Reason(Code.BAD_PLAN, "covered shapes", "none", "at least one")]
    wrong = [s for s in plan.shapes if s.rows not in context.limits_widths or s.mode not in spec.modes]
    wrong += [s for s in plan.shapes if not 1 <= s.requests <= s.rows]
    wrong += [s for s in plan.shapes if s.mode is Mode.DECODE and s.rows != s.requests]
    listing = ", ".join(map(str, sorted(set(wrong))))
    wanted = "declared modes and widths, one row a request in decode"
    return [Reason(Code.BAD_PLAN, "covered shapes", listing, wanted)] if wrong else []


Check = Callable[[KernelSpec, EngineFacts], Iterable[Reason]]


def _collect(name: str, checks: tuple[Check, ...], spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    for one in checks:
        try:
            yield from list(one(spec, facts))
        except Exception as error:
            yield raised(f"{name}: guard {one.__name__.strip('_')}", error, "the declaration is malformed")


def _asked(name: str, method: str, ask: Callable[[], Iterable[Any]]) -> list[Reason]:
    try:
        answers = list(ask() or ())
    except (Exception, SystemExit) as error:
        return [raised(f"{name}: {method}", error)]
    return [a if isinstance(a, Reason) else Reason(Code.LIBRARY, name, found=str(a)) for a in answers]


def _contract(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    if facts.contract not in spec.contract:
        hint = f"install a release of {spec.name} that speaks contract version {facts.contract}"
        yield Reason(Code.CONTRACT_VERSION, spec.name, str(spec.contract), str(facts.contract), hint)
    for feature in sorted(spec.needs - facts.features):
        yield Reason(Code.CONTRACT_FEATURE, feature, "not offered by this host", "offered")


def _identity(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    if spec.vendor != facts.vendor:
        yield Reason(Code.VENDOR, "device vendor", facts.vendor, spec.vendor)
    if facts.architecture not in spec.architectures:
        yield Reason(Code.ARCHITECTURE, "model architecture", facts.architecture, _listed(spec.architectures))


def _device(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    limits = spec.limits(facts.isa)
    if limits is None:
        yield Reason(Code.ISA, "instruction set", facts.isa, _listed(spec.devices))
        return
    if facts.tensor_parallel not in limits.tensor_parallel:
        wanted = _listed(limits.tensor_parallel)
        yield Reason(Code.TENSOR_PARALLEL, "tensor-parallel size", str(facts.tensor_parallel), wanted)
    if limits.resident_blocks > facts.resident_blocks:
        hint = "the device is partitioned or smaller than the kernels were made for"
        wanted = f"at least {limits.resident_blocks}"
        yield Reason(Code.RESIDENT_BLOCKS, "blocks that run at once", str(facts.resident_blocks), wanted, hint)
    if limits.shared_memory > facts.shared_memory:
        wanted = f"at least {limits.shared_memory} bytes"
        yield Reason(Code.SHARED_MEMORY, "shared memory a block", f"{facts.shared_memory} bytes", wanted)
    if not limits.widths:
        yield Reason(Code.BAD_PLAN, f"widths on {facts.isa}", "none", "at least one")


def _formats(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    requires = spec.requires
    if requires.dtypes is not None and facts.dtype not in requires.dtypes:
        hint = f"start with --dtype {min(requires.dtypes)}" if requires.dtypes else ""
        yield Reason(Code.DTYPE, "activation dtype", facts.dtype, _listed(requires.dtypes), hint)
    if requires.weight_formats is not None:
        strange = facts.weight_formats - requires.weight_formats
        if strange or not facts.weight_formats:
            found = _listed(strange) if strange else "none known"
            yield Reason(Code.WEIGHT_FORMAT, "weight formats", found, _listed(requires.weight_formats))
    if requires.kv_dtypes is not None and facts.kv_dtype not in requires.kv_dtypes:
        yield Reason(Code.KV_LAYOUT, "KV dtype", facts.kv_dtype, _listed(requires.kv_dtypes))
    if requires.page_sizes is not None and facts.page_size not in requires.page_sizes:
        yield Reason(Code.KV_LAYOUT, "KV page size", str(facts.page_size), _listed(requires.page_sizes))


def _conditions(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    yield from _fields(Code.CONFIG_FIELD, "config", spec.requires.config, facts.config)
    yield from _fields(Code.SETTING, "setting", spec.requires.settings, facts.settings)


def _fields(code: Code, kind: str, conditions: Mapping[str, Condition], values: Mapping[str, Any]) -> Iterator[Reason]:
    for name in sorted(conditions):
        subject = f"{kind} {name}"
        try:
            wanted = conditions[name].fault(values.get(name))
            found = "not known here" if name not in values else repr(values[name])[:200]
        except Exception as error:
            yield raised(subject, error)
            continue
        if wanted is not None:
            yield Reason(code, subject, found, wanted)


def _capabilities(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    for name in sorted(facts.capabilities):
        version = facts.capabilities[name]
        known = spec.accepts.get(name)
        if known is None:
            hint = "these kernels were not made to work beside it"
            yield Reason(Code.CAPABILITY, f"engine capability {name}", "in use", "not in use", hint)
        elif version > known:
            yield Reason(Code.CAPABILITY, f"engine capability {name}", f"version {version}", f"at most version {known}")


def _coverage(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    layers = spec.covers.layers
    if layers is None:
        return
    if not spec.covers.boundary:
        yield Reason(Code.COVERAGE, f"layers {layers}", "no boundary state declared", "the state at both ends, by name")
    if "coverage.layers" not in facts.features:
        yield Reason(Code.COVERAGE, f"layers {layers}", "this host runs whole steps only", "a whole step")


def _deadline(spec: KernelSpec, facts: EngineFacts) -> Iterator[Reason]:
    deadline = deadline_for(facts.watchdog_s)
    if deadline < spec.min_deadline_s:
        hint = f"raise the watchdog to at least {2 * spec.min_deadline_s:g} s"
        found = f"{deadline:g} s, half the watchdog's {facts.watchdog_s:g} s"
        yield Reason(Code.DEADLINE_TOO_SHORT, "deadline of waits", found, f"at least {spec.min_deadline_s:g} s", hint)


def _listed(values: Collection[object]) -> str:
    numbers = sorted(value for value in values if isinstance(value, int))
    words = sorted(str(value) for value in values if not isinstance(value, int))
    return ", ".join([*map(str, numbers), *words]) or "nothing"
