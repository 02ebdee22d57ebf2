"""One library in a small engine, as the checks try it, and the two ways that a check ends early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat_plugin.conformance.case import Case
from lowlat_plugin.conformance.reference import ReferenceHost
from lowlat_plugin.host import Host
from lowlat_plugin.install import LowLatency, Policy
from lowlat_plugin.kernel import BuildContext, Plan
from lowlat_plugin.registry import Candidate, Registry
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Shape

if TYPE_CHECKING:
    from torch import Tensor


class Skipped(Exception):  # noqa: N818 - an answer rather than a fault
    """This check does not apply."""


class Failed(AssertionError):  # noqa: N818 - an answer rather than a fault
    """The promise was not kept."""


def expect(condition: bool, message: str) -> None:
    """Raises `Failed` with `message` where the condition does not hold."""
    if not condition:
        raise Failed(message)


def host_of(case: Case) -> Host:
    """The case's own engine, or one rank of the reference engine."""
    return case.host(case) if case.host is not None else ReferenceHost(case)


def installed(candidate: Candidate, host: Host, prove: bool = True, broken: bool = False) -> LowLatency:
    """The library on this host, required, and proven if `prove`. `broken`: its probe throws. Raises Refused."""
    registry = Registry()
    registry.register(candidate.spec, candidate.distribution, candidate.version)
    low = LowLatency(host, registry, Policy.REQUIRE)
    low.choose()
    if broken and low.kernel is not None:
        low.kernel.probe = _broken_probe  # type: ignore[method-assign]
    low.build()
    low.bind()
    if prove:
        low.prove()
    return low


def _broken_probe(context: BuildContext) -> Plan:
    raise RuntimeError("made to fail by the conformance kit")


def widest_decode(low: LowLatency) -> Shape:
    """The widest decode step that is covered. Raises `Skipped` where there is none."""
    assert low.table is not None
    shapes = [shape for shape in low.table.covered if shape.mode is Mode.DECODE]
    if not shapes:
        raise Skipped("no decode shapes are covered")
    return shapes[-1]


def decode_once(low: LowLatency, host: Host) -> Tensor:
    """Logits [R, V] of one widest decode step."""
    import torch

    with torch.inference_mode():
        shape = widest_decode(low)
        return low.forward(Shadow(host, [shape], seed=5).step(shape)).clone()
