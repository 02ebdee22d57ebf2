"""Which kernel library an engine gets: every candidate is asked, in order, and every reason against it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from lowlat_plugin import guard
from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.kernel import Kernel
from lowlat_plugin.reasons import Code, Reason, Refused
from lowlat_plugin.registry import Candidate, Registry, implementation
from lowlat_plugin.report import CandidateReport


@dataclass(frozen=True)
class Choice:
    """The first candidate that fits and its kernels, None where none does; and what was found of each candidate."""

    candidate: Candidate | None
    kernel: Kernel | None
    tried: tuple[CandidateReport, ...]

    @property
    def key(self) -> str:
        """The candidate's, which must be the same on every rank; empty where none fits."""
        return self.candidate.key if self.candidate is not None else ""

    def why_none(self, registry: Registry) -> list[Reason]:
        """All that speaks against the candidates, and against what could not be loaded."""
        reasons = [reason for tried in self.tried for reason in tried.reasons]
        reasons += [failure.reason for failure in registry.failures]
        return reasons or [Reason(Code.NOT_FOUND, "kernel libraries", "none installed", "one that fits this model")]

    def none_fits(self, facts: EngineFacts) -> str:
        """One line for a log, where no candidate fits: how many there are, and what stands against the nearest."""
        if not self.tried:
            return "no kernel library is installed: the general path computes every step"
        nearest = min(self.tried, key=CandidateReport.distance)
        where = f"{facts.architecture} on {facts.isa}"
        return f"none of {len(self.tried)} kernel libraries fits {where}; nearest is {nearest.why_not()}"


def choose(registry: Registry, facts: EngineFacts, name: str | None = None) -> Choice:
    """Ask the candidates whether they fit these facts, all of them, or those called `name`.

    Raises Refused when `name` is given and nothing of this name is installed.
    """
    chosen: tuple[Candidate, Kernel] | None = None
    tried: list[CandidateReport] = []
    for candidate in registry.named(name) if name else registry.candidates:
        reasons, kernel = guard.check(candidate.spec, facts), None
        if not reasons:
            try:
                kernel = implementation(candidate.spec)
                reasons = guard.check_library(kernel, facts)
            except Refused as refusal:
                reasons = list(refusal.reasons)
        tried.append(CandidateReport(candidate.key, candidate.version, tuple(reasons)))
        if kernel is not None and not reasons and chosen is None:
            chosen = candidate, kernel
    first, kernels = chosen or (None, None)
    return Choice(first, kernels, tuple(tried))
