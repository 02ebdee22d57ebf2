"""Why kernels do not run: one structured reason for each cause, never a bare sentence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Code(StrEnum):
    """Every cause the contract can name. Hosts and tests match on these, people read the rest of the reason."""

    LOAD_FAILED = "load-failed"
    NOT_A_SPEC = "not-a-spec"
    DUPLICATE = "duplicate"
    NOT_FOUND = "not-found"
    CONTRACT_VERSION = "contract-version"
    CONTRACT_FEATURE = "contract-feature"
    VENDOR = "vendor"
    ISA = "isa"
    ARCHITECTURE = "architecture"
    TENSOR_PARALLEL = "tensor-parallel"
    RESIDENT_BLOCKS = "resident-blocks"
    SHARED_MEMORY = "shared-memory"
    DTYPE = "dtype"
    WEIGHT_FORMAT = "weight-format"
    KV_LAYOUT = "kv-layout"
    CONFIG_FIELD = "config-field"
    SETTING = "setting"
    CAPABILITY = "capability"
    COVERAGE = "coverage"
    DEADLINE_TOO_SHORT = "deadline-too-short"
    LIBRARY = "library"
    RAISED = "raised"
    RANKS_DIFFER = "ranks-differ"
    BAD_PLAN = "bad-plan"
    PLAN_CHANGED = "plan-changed"
    POOLS_MOVED = "pools-moved"
    LATE_MEMORY = "late-memory"
    NUMERICS = "numerics"
    KV_WRITE = "kv-write"
    DEADLINE = "deadline"
    WEIGHTS_UPDATED = "weights-updated"


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """One cause: what was looked at, what was found there, what was wanted, and what to do about it."""

    code: str
    subject: str
    found: str = ""
    wanted: str = ""
    hint: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        text = f"[{self.code}] {self.subject}"
        if self.found:
            text += f": found {self.found}"
        if self.wanted:
            text += f"{',' if self.found else ':'} wanted {self.wanted}"
        if self.hint:
            text += f" ({self.hint})"
        return text if self.rank is None else f"rank {self.rank}: {text}"


class Refused(RuntimeError):  # noqa: N818 - an answer rather than a fault
    """Kernels were refused. `reasons` holds every cause that was found, not only the first."""

    def __init__(self, subject: str, reasons: Iterable[Reason]) -> None:
        self.subject = subject
        self.reasons = tuple(reasons)
        super().__init__("\n  - ".join([f"{subject} cannot run here:", *map(str, self.reasons)]))


class StepFailed(RuntimeError):  # noqa: N818 - an answer rather than a fault
    """Kernels failed inside a step. They are disabled; the step's keys and values may be half written.

    A host of one rank may run the general path on the same step, which writes the same slots again.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(str(reason))


class DeadlineExceeded(RuntimeError):  # noqa: N818 - an answer rather than a fault
    """A wait for another rank passed its deadline. Every rank of the step raises this, and the device stays usable."""


def raised(subject: str, error: BaseException, hint: str = "") -> Reason:
    """Turn whatever a library threw into a reason that names it."""
    code = Code.DEADLINE if isinstance(error, DeadlineExceeded) else Code.RAISED
    return Reason(code, subject, found=f"{type(error).__name__}: {error}"[:500], wanted="no exception", hint=hint)
