"""What a library promises to the ranks of a group: they agree, and none waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowlat_plugin.agreement import ThreadRanks
from lowlat_plugin.conformance.case import load_case
from lowlat_plugin.conformance.reference import ReferenceHost
from lowlat_plugin.conformance.trial import Skipped, expect, installed, widest_decode
from lowlat_plugin.host import Host
from lowlat_plugin.install import LowLatency
from lowlat_plugin.reasons import DeadlineExceeded, Refused
from lowlat_plugin.registry import Candidate
from lowlat_plugin.shadow import Shadow

if TYPE_CHECKING:
    from torch import Tensor


def agreement(candidate: Candidate) -> str:
    """Two ranks make the same plan; when the probe of one throws, both refuse and name the rank."""
    ranks = ThreadRanks(2)
    case = load_case(candidate.spec)
    if case.host is not None:
        raise Skipped("the example brings its own engine")
    hosts = [ReferenceHost(case, ranks.of(rank)) for rank in range(2)]
    lows = _on_all([lambda host=host: installed(candidate, host, prove=False) for host in hosts])  # type: ignore[misc]
    expect(all(isinstance(low, LowLatency) for low in lows), f"two well ranks do not agree: {lows}")
    for low in lows:
        low.close()
    outcomes = _on_all(
        [lambda host=host: installed(candidate, host, False, broken=host.agreement.rank == 1) for host in hosts]  # type: ignore[misc]
    )
    named = [isinstance(o, Refused) and any(r.rank == 1 for r in o.reasons) for o in outcomes]
    expect(all(named), f"a probe that throws on rank 1 gave {outcomes}")
    return "equal plans; a broken rank stops both"


def deadline(candidate: Candidate) -> str:
    """A rank stays away: within twice the deadline every rank raises DeadlineExceeded, and the next step runs."""
    case = load_case(candidate.spec)
    if case.group is None:
        raise Skipped("the example has one rank; give Case.group to check waits")
    hosts = case.group(2)
    lows = _on_all([lambda host=host: installed(candidate, host) for host in hosts])  # type: ignore[misc]
    expect(all(isinstance(low, LowLatency) for low in lows), f"two ranks could not be built: {lows}")
    started = time.monotonic()
    early = _on_all([lambda: _raw_step(lows[0], hosts[0])])[0]
    waited = time.monotonic() - started
    late = _on_all([lambda: _raw_step(lows[1], hosts[1])])[0]
    expect(isinstance(early, DeadlineExceeded), f"the waiting rank gave {early!r}")
    expect(isinstance(late, DeadlineExceeded), f"the late rank gave {late!r}")
    expect(waited <= 2 * case.deadline_s, f"the wait took {waited:.2f} s, the deadline is {case.deadline_s:g} s")
    together = _on_all([lambda low=low, host=host: _raw_step(low, host) for low, host in zip(lows, hosts)])  # type: ignore[misc]
    expect(not any(isinstance(o, BaseException) for o in together), f"the next step failed: {together}")
    return f"both ranks gave up by name after {waited:.2f} s of {case.deadline_s:g} s; the next step ran"


def _raw_step(low: LowLatency, host: Host) -> Tensor:
    """A step without the safety net of `LowLatency.forward`, so that the library's own error is seen."""
    import torch

    assert low.kernel is not None
    with torch.inference_mode():
        shape = widest_decode(low)
        step = Shadow(host, [shape], seed=5, prefill=False).step(shape)
        logits = low.kernel.forward(step)
        host.synchronize()
        return logits


def _on_all(works: list[Callable[[], Any]]) -> list[Any]:
    """Run one function a rank, each in its thread; what a rank raised stands in its place."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for index, thread in enumerate(threads):
        thread.join(120)
        if thread.is_alive():
            results[index] = TimeoutError("this rank has not come back after 120 s")
    return results
