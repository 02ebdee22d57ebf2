"""What every kernel library must do, one function a promise. A check returns a line of detail, or throws."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from lowlat_plugin.conformance.life_checks import rebinding, suspension, updates
from lowlat_plugin.conformance.rank_checks import agreement, deadline
from lowlat_plugin.conformance.spec_checks import declaration, refusals
from lowlat_plugin.conformance.step_checks import fallback, outputs, precision, replay, weights
from lowlat_plugin.conformance.trial import Failed, Skipped
from lowlat_plugin.registry import Candidate

CHECKS: dict[str, Callable[[Candidate], str]] = {
    check.__name__: check
    for check in (
        declaration,
        refusals,
        outputs,
        precision,
        weights,
        replay,
        fallback,
        rebinding,
        suspension,
        updates,
        agreement,
        deadline,
    )
}
"""By name, in the order in which they run. The first line of a check's documentation is its promise."""


class CheckResult(msgspec.Struct, frozen=True):
    """`status` is passed, failed or skipped; `detail` says what was measured, what went wrong, or why not run."""

    check: str
    promise: str
    status: str
    detail: str
    seconds: float


def run_check(candidate: Candidate, name: str) -> CheckResult:
    """Run one check; whatever the library throws becomes a failed result. Raises KeyError for an unknown name."""
    function, started = CHECKS[name], time.monotonic()
    promise = (function.__doc__ or "").strip()
    try:
        status, detail = "passed", function(candidate)
    except Skipped as skip:
        status, detail = "skipped", str(skip)
    except (Exception, SystemExit) as error:
        status, detail = "failed", str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
    return CheckResult(name, promise, status, detail, round(time.monotonic() - started, 3))


def run_checks(candidate: Candidate) -> list[CheckResult]:
    """All checks, one after another."""
    return [run_check(candidate, name) for name in CHECKS]
