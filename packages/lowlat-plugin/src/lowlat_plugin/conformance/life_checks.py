"""What a library promises over its life: pools that move, memory that is lent, weights that change."""

from __future__ import annotations

from lowlat_plugin.conformance.case import load_case
from lowlat_plugin.conformance.reference import ReferenceHost
from lowlat_plugin.conformance.trial import Skipped, expect, host_of, installed
from lowlat_plugin.install import Policy, State
from lowlat_plugin.kernel import offers
from lowlat_plugin.reasons import Code
from lowlat_plugin.registry import Candidate


def rebinding(candidate: Candidate) -> str:
    """Pools that move without a bind are noticed; after bind the kernels use the new ones only."""
    import torch

    host = host_of(load_case(candidate.spec))
    if not isinstance(host, ReferenceHost):
        raise Skipped("the example brings its own engine")
    low = installed(candidate, host)
    old = host.layers
    host.reallocate()
    for layer in old:
        layer.k_SHD.fill_(float("nan"))
        layer.v_SHD.fill_(float("nan"))
    before = [layer.k_SHD.clone() for layer in old]
    low.bind()
    low.prove()
    expect(low.state is State.ACTIVE, f"not active after re-binding: {low.report().reasons}")
    untouched = all(torch.equal(a.isnan(), b.k_SHD.isnan()) for a, b in zip(before, old, strict=True))
    expect(untouched, "the old pools were written after bind")
    low.close()
    return f"{len(old)} layers moved"


def suspension(candidate: Candidate) -> str:
    """Suspend and resume, where offered, end in the same promise kept; close may be called twice."""
    low = installed(candidate, host_of(load_case(candidate.spec)))
    kernel = low.kernel
    assert kernel is not None
    low.suspend()
    low.resume()
    expect(low.state is State.ACTIVE, f"not active after resume: {low.report().reasons}")
    detail = "memory is given back" if offers(kernel, "suspend") else "memory is kept"
    low.close()
    low.close()
    return f"suspend: {detail}; closed twice"


def updates(candidate: Candidate) -> str:
    """After a weight update the kernels are proven again, or disabled by name; never stale."""
    host = host_of(load_case(candidate.spec))
    low = installed(candidate, host)
    kernel = low.kernel
    assert kernel is not None
    low.policy = Policy.AUTO
    low.refresh()
    if offers(kernel, "refresh"):
        ok = low.state is State.ACTIVE or any(r.code == Code.WEIGHTS_UPDATED for r in low.report().reasons)
        expect(ok, f"neither active nor disabled by name after refresh: {low.report().reasons}")
        return "refreshed" if low.state is State.ACTIVE else "disabled by name"
    expect(any(r.code == Code.WEIGHTS_UPDATED for r in low.report().reasons), "stale weights are not named")
    return "disabled by name"
