"""What happened to low-latency kernels in an engine, as data for `doctor`, the admin route and the log."""

from __future__ import annotations

import msgspec

from lowlat_plugin.reasons import Code, Reason
from lowlat_plugin.registry import Failure
from lowlat_plugin.shadow import ShapeResult


class CandidateReport(msgspec.Struct, frozen=True):
    """One candidate and why it was not chosen; no reasons means that it fits."""

    key: str
    version: str
    reasons: tuple[Reason, ...] = ()

    def distance(self) -> tuple[bool, int]:
        """Orders refused candidates, the nearest first. One for another vendor or model is asked nothing else."""
        elsewhere = any(reason.code in (Code.VENDOR, Code.ARCHITECTURE) for reason in self.reasons)
        return elsewhere, len(self.reasons)

    def why_not(self) -> str:
        """One line for a log: the first reason, and how many there are beside it."""
        more = len(self.reasons) - 1
        first = "; ".join(map(str, self.reasons[:1]))
        return f"{self.key}: {first}" + (f" and {more} more (lowlat plugins doctor shows all)" if more > 0 else "")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's kernels: what was chosen and why not the others, what is covered, what was measured and counted."""

    policy: str
    state: str
    on: bool
    kernels: str | None = None
    covered: tuple[str, ...] = ()
    disabled: dict[str, str] = {}
    reasons: tuple[Reason, ...] = ()
    candidates: tuple[CandidateReport, ...] = ()
    failures: tuple[Failure, ...] = ()
    shadow: tuple[ShapeResult, ...] = ()
    steps: list[tuple[str, str, int]] = []

    def lines(self) -> list[str]:
        """For people: one line for the verdict, then every candidate, failure and measurement."""
        idle = "no kernel library is active"
        if self.policy == "off":
            idle += ": --low-latency is off"
        elif not (self.candidates or self.failures or self.reasons):
            idle += ": none is installed, the general path computes every step"
        verdict = f"{self.kernels}: {self.state}" if self.kernels else idle
        out = [verdict + ("" if self.on else ", switched off")]
        if self.covered:
            out.append("  covers " + ", ".join(self.covered))
        out += [f"  disabled {shape}: {why}" for shape, why in self.disabled.items()]
        out += [f"  - {reason}" for reason in self.reasons]
        for candidate in self.candidates:
            out.append(f"{candidate.key} {candidate.version}: " + ("refused" if candidate.reasons else "fits"))
            out += [f"  - {reason}" for reason in candidate.reasons]
        out += [f"{failure.distribution}: could not be loaded\n  - {failure.reason}" for failure in self.failures]
        for result in self.shadow:
            out.append(f"shadow {result.shape}: " + "; ".join(map(str, result.measurements)))
        out += [f"steps {path} ({reason}): {count}" for path, reason, count in self.steps]
        return out
