"""Which kernel libraries are installed. Load errors are kept and shown, never swallowed.

A distribution lists its specs in the entry-point group `lowlat.kernels`; the value is a `KernelSpec`, a sequence of
them, or a function without arguments that returns either. Loading must not need a device.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec

from lowlat_plugin.kernel import Kernel
from lowlat_plugin.reasons import Code, Reason, Refused, raised
from lowlat_plugin.spec import KernelSpec

GROUP = "lowlat.kernels"


class Candidate(msgspec.Struct, frozen=True):
    """One spec and where it came from. The key orders candidates, so the choice is the same in every process."""

    distribution: str
    version: str
    spec: KernelSpec

    @property
    def key(self) -> str:
        return f"{self.distribution}/{self.spec.name}"

    def answers_to(self, name: str) -> bool:
        return name in (self.distribution, self.spec.name, self.key)


class Failure(msgspec.Struct, frozen=True):
    """An entry point that could not be used."""

    distribution: str
    entry_point: str
    reason: Reason

    def answers_to(self, name: str) -> bool:
        return name in (self.distribution, self.entry_point, f"{self.distribution}/{self.entry_point}")


class Registry:
    """Candidates keyed by (vendor, architecture, distribution, name), and what failed to load."""

    def __init__(self) -> None:
        self._candidates: dict[str, Candidate] = {}
        self.failures: list[Failure] = []

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self._candidates[key] for key in sorted(self._candidates))

    def register(self, spec: KernelSpec, distribution: str, version: str = "") -> None:
        """Add a spec. The same spec again changes nothing.

        Raises Refused (code `duplicate`) when the distribution already has a different spec of that name.
        """
        candidate = Candidate(distribution, version, spec)
        known = self._candidates.get(candidate.key)
        if known is not None and known.spec != spec:
            wanted = "one spec a name in a distribution"
            raise Refused(candidate.key, [Reason(Code.DUPLICATE, candidate.key, "two different specs", wanted)])
        self._candidates[candidate.key] = candidate

    def for_model(self, vendor: str, architecture: str) -> tuple[Candidate, ...]:
        """Candidates for one vendor and architecture, in the order in which they are tried."""
        fits = (c for c in self.candidates if c.spec.vendor == vendor and architecture in c.spec.architectures)
        return tuple(fits)

    def named(self, name: str) -> tuple[Candidate, ...]:
        """Candidates that answer to a distribution, a spec's name, or `distribution/spec`.

        Raises Refused when nothing does, with the load error if an entry point of that name failed.
        """
        found = tuple(c for c in self.candidates if c.answers_to(name))
        if found:
            return found
        failed = [failure.reason for failure in self.failures if failure.answers_to(name)]
        if failed:
            raise Refused(name, failed)
        installed = ", ".join(c.key for c in self.candidates) or "none"
        hint = "`lowlat plugins list` shows what is installed"
        raise Refused(
            name, [Reason(Code.NOT_FOUND, name, f"installed: {installed}", "an installed kernel library", hint)]
        )


def discover(group: str = GROUP, entry_points: Iterable[metadata.EntryPoint] | None = None) -> Registry:
    """Load every entry point of the group. Safe to call in every process and any number of times."""
    registry = Registry()
    points = metadata.entry_points(group=group) if entry_points is None else entry_points
    for point in sorted(set(points), key=lambda p: (_distribution(p)[0], p.name, p.value)):
        _load(registry, point)
    return registry


def _load(registry: Registry, point: metadata.EntryPoint) -> None:
    distribution, version = _distribution(point)
    subject = f"{distribution}: entry point {point.name} = {point.value}"
    try:
        loaded = point.load()
        for spec in _specs(loaded() if callable(loaded) else loaded):
            registry.register(spec, distribution, version)
    except Refused as refusal:
        registry.failures += [Failure(distribution, point.name, reason) for reason in refusal.reasons]
    except (Exception, SystemExit) as error:
        reason = msgspec.structs.replace(raised(subject, error), code=Code.LOAD_FAILED, wanted="a KernelSpec")
        registry.failures.append(Failure(distribution, point.name, reason))


def _specs(loaded: Any) -> list[KernelSpec]:
    found = [loaded] if isinstance(loaded, KernelSpec) else list(loaded)
    for spec in found:
        if not isinstance(spec, KernelSpec):
            reason = Reason(Code.NOT_A_SPEC, "entry point", type(spec).__name__, "lowlat_plugin.KernelSpec")
            raise Refused("entry point", [reason])
    return found


def _distribution(point: metadata.EntryPoint) -> tuple[str, str]:
    name, version = "unknown", ""
    with contextlib.suppress(Exception):
        if point.dist is not None:
            name, version = point.dist.name, point.dist.version
    return name, version


def load_object(path: str) -> Any:
    """Import `"module:attribute"`. Raises ValueError for another form, ImportError or AttributeError as usual."""
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"{path!r} is not of the form 'module:attribute'")
    return getattr(importlib.import_module(module), attribute)


def implementation(spec: KernelSpec) -> Kernel:
    """Import and construct a spec's implementation. Raises Refused (code `load-failed`) whatever goes wrong."""
    try:
        made = load_object(spec.implementation)(spec)
    except (Exception, SystemExit) as error:
        reason = raised(f"{spec.name}: {spec.implementation}", error)
        raise Refused(spec.name, [msgspec.structs.replace(reason, code=Code.LOAD_FAILED)]) from error
    if not isinstance(made, Kernel):
        wanted = "a subclass of lowlat_plugin.Kernel"
        raise Refused(spec.name, [Reason(Code.LOAD_FAILED, spec.implementation, type(made).__name__, wanted)])
    return made
