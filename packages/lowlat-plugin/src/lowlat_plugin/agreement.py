"""Ranks decide together: whatever one of them finds, all of them act on.

Every stage that a rank could fail ends in one gather of a small record, also when the rank's own work threw, so no peer
is left waiting in the next collective. The host supplies the transport.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from lowlat_plugin.reasons import Code, Reason, Refused, raised

T = TypeVar("T")


class Agreement(Protocol):
    """All-gather of bytes over the ranks of one step. Results are in rank order and include this rank's own."""

    rank: int
    size: int

    def all_gather(self, payload: bytes) -> list[bytes]: ...


class Alone:
    """The agreement of a single rank."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class ThreadRanks:
    """Ranks that are threads of one process, for tests and the conformance kit. `of(rank)` is one rank's agreement."""

    def __init__(self, size: int, timeout_s: float = 30.0) -> None:
        self.size = size
        self._slots: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def of(self, rank: int) -> Agreement:
        return _ThreadRank(self, rank)

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self._slots[rank] = payload
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered


class _ThreadRank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.rank = rank
        self.size = ranks.size
        self._ranks = ranks

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ranks.exchange(self.rank, payload)


class Outcome(msgspec.Struct, frozen=True):
    """What one rank says at the end of a stage."""

    stage: str
    digest: str
    reasons: tuple[Reason, ...] = ()


def digest(value: Any) -> str:
    """A short hash of anything msgspec can encode, the same on every rank for equal values."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def agree(agreement: Agreement, stage: str, reasons: tuple[Reason, ...], identity: str = "") -> tuple[Reason, ...]:
    """Gather this stage's outcome. Returns the reasons of all ranks, empty when every rank is well and all are alike.

    `identity` is what must be equal over the ranks, usually a digest. Reasons carry their rank when there are several.
    """
    if agreement.size == 1:
        return reasons
    mine = msgspec.json.encode(Outcome(stage, identity, reasons))
    outcomes = [msgspec.json.decode(payload, type=Outcome) for payload in agreement.all_gather(mine)]
    found = tuple(
        msgspec.structs.replace(reason, rank=rank)
        for rank, outcome in enumerate(outcomes)
        for reason in outcome.reasons
    )
    if found:
        return found
    said = {(outcome.stage, outcome.digest) for outcome in outcomes}
    if len(said) == 1:
        return ()
    listing = "; ".join(f"rank {rank} {outcome.stage} {outcome.digest}" for rank, outcome in enumerate(outcomes))
    return (Reason(Code.RANKS_DIFFER, stage, listing, "the same on every rank"),)


def settle(
    agreement: Agreement, subject: str, stage: str, work: Callable[[], T], identity: Callable[[T], str] = lambda _: ""
) -> T:
    """Do this rank's part of a stage, then agree on it.

    Raises Refused on every rank with the reasons of all ranks if any rank's work threw or refused, or if identities
    differ. KeyboardInterrupt passes through.
    """
    results: list[T] = []
    reasons: tuple[Reason, ...] = ()
    said = ""
    try:
        results.append(work())
        said = identity(results[0])
    except Refused as refusal:
        reasons = refusal.reasons
    except (Exception, SystemExit) as error:
        reasons = (raised(f"{subject}: {stage}", error),)
    everyones = agree(agreement, stage, reasons, said)
    if everyones:
        raise Refused(subject, everyones)
    return results[0]
