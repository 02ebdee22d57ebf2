"""The contract's own version, and how a kernel library says which versions it speaks.

The version is one integer that grows when an existing call changes meaning. New optional behaviour is a *feature*,
named below: a library lists the features it cannot do without in `KernelSpec.needs`, so that adding a feature to the
contract breaks nobody.
"""

from __future__ import annotations

import msgspec

CONTRACT_VERSION = 1

FEATURES: dict[str, str] = {
    "decode": "steps in which every request has one row",
    "verify": "steps in which a request has several rows, each attending to those before it",
    "kv.paged": "keys and values addressed by page table, page size and a KVLayout",
    "kv.rebind": "bind() is called again after every re-allocation",
    "weights.observe": "observe_weight() is called for each tensor while the checkpoint loads",
    "weights.refresh": "refresh() is called after weights were updated in place",
    "suspend": "suspend() and resume() are called around a release of device memory",
    "graphs": "forward() is recorded into a graph and replayed; step buffers keep their addresses",
    "shadow.forced": "the host's general forward can be forced to the kernels' selections",
    "coverage.layers": "kernels may cover a range of layers, given the state at its ends",
    "communicator": "the binding carries a communicator for more than one rank",
}
BASIC_FEATURES = frozenset({"decode", "verify", "kv.paged", "kv.rebind"})


class VersionRange(msgspec.Struct, frozen=True):
    """Contract versions a library speaks, both ends included."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"
