"""What a kernel library declares about itself, before anything of it is imported that needs a device.

Empty and absent mean the same thing everywhere: `None` accepts anything, an empty set accepts nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from lowlat_plugin.version import CONTRACT_VERSION, VersionRange


class Mode(StrEnum):
    """What a step does. Kernels cover decode and verify; prefill always takes the general path."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


class Metric(StrEnum):
    """How two tensors are compared. Smaller is closer for all but COSINE, which is a similarity."""

    BITWISE = "bitwise"
    MAX_ABS = "max-abs"
    RELATIVE = "relative"
    COSINE = "cosine"


class Bound(msgspec.Struct, frozen=True):
    """The furthest an output may be from the general path's. `limit` is ignored for BITWISE."""

    metric: Metric
    limit: float = 0.0


class Numerics(msgspec.Struct, frozen=True):
    """The promise that the shadow check measures.

    `bounds` has an entry for each output: `logits`, `kv` (the keys and values written), and any state the library
    names. Selections (greedy token, router, index) may differ from the general path's only where the general path
    scores the two choices within `tie_margin` of one another.
    """

    bounds: dict[str, Bound]
    tie_margin: float = 0.0


class DeviceLimits(msgspec.Struct, frozen=True):
    """What the kernels can do on one instruction-set architecture.

    `widths` are row counts of a step. `resident_blocks` is how many blocks must run at once (0: it does not matter),
    and `shared_memory` is bytes a block (0: it does not matter).
    """

    widths: frozenset[int]
    tensor_parallel: frozenset[int] = frozenset({1})
    resident_blocks: int = 0
    shared_memory: int = 0


class Condition(msgspec.Struct, frozen=True):
    """What a configuration field or host setting must satisfy. Every part that is given must hold.

    `present=False` lets the field be missing (or null), in which case nothing else is asked of it.
    """

    one_of: tuple[Any, ...] | None = None
    at_least: float | None = None
    at_most: float | None = None
    multiple_of: int | None = None
    present: bool = True

    def fault(self, value: object) -> str | None:
        """Say what was wanted if `value` does not do, else None. Never raises, whatever the value is."""
        if value is None:
            nothing = not self.present or (self.one_of is not None and None in self.one_of)
            return None if nothing else f"a value, {self}"
        if self.one_of is not None and not any(_same(value, choice) for choice in self.one_of):
            return str(self)
        if self.at_least is None and self.at_most is None and self.multiple_of is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"a number, {self}"
        low = self.at_least is not None and value < self.at_least
        high = self.at_most is not None and value > self.at_most
        uneven = self.multiple_of is not None and value % self.multiple_of != 0
        return str(self) if low or high or uneven else None

    def __str__(self) -> str:
        parts = []
        if self.one_of is not None:
            parts.append(
                "one of " + ", ".join(map(repr, self.one_of)) if len(self.one_of) != 1 else repr(self.one_of[0])
            )
        if self.at_least is not None:
            parts.append(f"at least {self.at_least:g}")
        if self.at_most is not None:
            parts.append(f"at most {self.at_most:g}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        return " and ".join(parts) or "anything"


def _same(left: object, right: object) -> bool:
    """Equality in which True is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


class Requirements(msgspec.Struct, frozen=True):
    """What must be true of model and engine. `None` accepts anything.

    `config` names fields of the model's configuration as Hugging Face spells them; `settings` names the host's own
    arguments. A field or setting that the host has never heard of is a reason, not a crash.
    """

    dtypes: frozenset[str] | None = None
    weight_formats: frozenset[str] | None = None
    kv_dtypes: frozenset[str] | None = None
    page_sizes: frozenset[int] | None = None
    config: dict[str, Condition] = {}
    settings: dict[str, Condition] = {}


class Coverage(msgspec.Struct, frozen=True):
    """Which part of a step the kernels compute.

    With `layers` unset that is the whole step, embedding to logits. A layer range `(first, last)`, last excluded, is
    allowed only with `boundary`, which names the state handed over at each end with its meaning, and only in a host
    that offers the feature `coverage.layers`. `sampling` says that tokens are chosen by the kernels too.
    """

    layers: tuple[int, int] | None = None
    boundary: dict[str, str] = {}
    sampling: bool = False
    draft_sampler: bool = False


class KernelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One set of kernels: what it is for, what it needs, what it promises, and where its code is.

    `implementation` is `"module:Class"`, a `lowlat_plugin.Kernel`; it is imported once the guard has passed, not
    before. `accepts` maps each engine capability that the kernels have been made to work with to the highest version
    known to them; a capability that is in use and not listed refuses. `example` is `"module:function"` returning a
    `conformance.Case`, a small model that these kernels cover, for `lowlat plugins check`.
    """

    name: str
    vendor: str
    architectures: frozenset[str]
    devices: dict[str, DeviceLimits]
    numerics: Numerics
    implementation: str
    contract: VersionRange = VersionRange(CONTRACT_VERSION, CONTRACT_VERSION)
    needs: frozenset[str] = frozenset()
    modes: frozenset[Mode] = frozenset({Mode.DECODE})
    requires: Requirements = Requirements()
    accepts: dict[str, int] = {}
    covers: Coverage = Coverage()
    min_deadline_s: float = 1.0
    example: str = ""
    description: str = ""

    def limits(self, isa: str) -> DeviceLimits | None:
        """The limits on one architecture; `"*"` in `devices` stands for every other one."""
        return self.devices.get(isa, self.devices.get("*"))
