"""What a library promises of its steps on one rank: what they compute, from what, and which ones."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from lowlat_plugin.conformance.case import load_case
from lowlat_plugin.conformance.reference import ReferenceHost
from lowlat_plugin.conformance.trial import Skipped, decode_once, expect, host_of, installed, widest_decode
from lowlat_plugin.host import Host
from lowlat_plugin.install import LowLatency
from lowlat_plugin.numerics import Measurement, measure
from lowlat_plugin.registry import Candidate
from lowlat_plugin.routing import Path
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.spec import Bound, Metric, Mode
from lowlat_plugin.steps import StepInputs

if TYPE_CHECKING:
    from torch import Tensor

STRICT_RELATIVE = Bound(Metric.RELATIVE, 0.0)


def outputs(candidate: Candidate) -> str:
    """Logits, KV and state are within the declared bounds at every width, beside padding, NaN and noisy pages."""
    low = installed(candidate, host_of(load_case(candidate.spec)))
    worst = [m for result in low.results for m in result.measurements]
    expect(len(low.results) == len({result.shape for result in low.results}), "not every shape was measured")
    low.close()
    return "; ".join(str(max(group, key=_distance)) for group in _by_output(worst))


def precision(candidate: Candidate) -> str:
    """In a 16-bit type the kernels' logits are no farther from those of float32 than the general path's are."""
    import torch

    case = load_case(candidate.spec)
    host = host_of(case)
    if case.dtype == "float32":
        raise Skipped("the example computes in float32")
    if not isinstance(host, ReferenceHost):
        raise Skipped("the example brings its own engine")
    wide = {name: tensor.float() for name, tensor in case.weights.items()}
    exact = type(host)(dataclasses.replace(case, dtype="float32", weights=wide))
    low = installed(candidate, host, prove=False)
    shape = widest_decode(low)
    with torch.inference_mode():
        shadow = Shadow(host, [shape], seed=7)
        step = shadow._without_nan(shadow.step(shape))
        for mine, theirs in zip(exact.layers, host.layers, strict=True):
            mine.k_SHD.copy_(theirs.k_SHD)
            mine.v_SHD.copy_(theirs.v_SHD)
        truth = exact.general(step).logits_RV
        general = measure("logits", STRICT_RELATIVE, truth, host.general(step).logits_RV).measured
        kernels = measure("logits", STRICT_RELATIVE, truth, low.forward(step)).measured
    low.close()
    expect(kernels <= general, f"{kernels:.3g} from float32, the general path {general:.3g}")
    return f"{kernels:.3g} from float32, the general path {general:.3g}"


def weights(candidate: Candidate) -> str:
    """The kernels compute with the weights they were given: other weights, other logits, again within bounds."""
    logits = []
    for seed in (0, 1):
        host = host_of(load_case(candidate.spec, seed))
        low = installed(candidate, host)
        logits.append(decode_once(low, host))
        low.close()
    expect(bool((logits[0] != logits[1]).any()), "two models with different weights give the same logits")
    return "two sets of weights, two sets of logits"


def replay(candidate: Candidate) -> str:
    """A step runs again from the same buffers with new values in them, and the same values give the same bits."""
    import torch

    host = host_of(load_case(candidate.spec))
    low = installed(candidate, host)
    shape = widest_decode(low)
    with torch.inference_mode():
        shadow = Shadow(host, [shape], seed=5)
        step = shadow.step(shape)
        run = _recorded(host, low, step)
        first = run().clone()
        tokens = step.token_ids_R.clone()
        step.token_ids_R.add_(1).remainder_(host.vocab_size)
        second = run().clone()
        step.token_ids_R.copy_(tokens)
        again = run().clone()
    low.close()
    expect(bool((first != second).any()), "new tokens in the same buffer gave the old logits")
    expect(torch.equal(first, again), "the same step gave other bits the second time")
    return f"{shape}, {'graph' if host.device.startswith('cuda') else 'eager'}, three runs"


def fallback(candidate: Candidate) -> str:
    """Prefill and wider steps take the general path, each with its reason; the switch works at once; counters count."""
    low = installed(candidate, host_of(load_case(candidate.spec)))
    shape = widest_decode(low)
    expect(low.route(Mode.PREFILL, 1, 64).reason == "prefill", "prefill is not refused by name")
    expect(low.route(Mode.DECODE, 4096, 4096).reason == "too-wide", "a very wide step is not refused by name")
    covered = low.route(shape.mode, shape.requests, shape.rows)
    low.counters.add(covered)
    low.switch(False)
    off = low.route(shape.mode, shape.requests, shape.rows)
    low.counters.add(off)
    low.switch(True)
    expect(covered.path is Path.KERNELS and off.reason == "switched-off", "the switch does not switch")
    expect(low.counters.total(Path.GENERAL) == 1 and low.counters.total(Path.KERNELS) == 1, "counters do not count")
    low.close()
    return "prefill, too-wide, switched-off"


def _recorded(host: Host, low: LowLatency, step: StepInputs) -> Callable[[], Tensor]:
    """The step as the host would replay it: a graph on a GPU, a plain call elsewhere."""
    import torch

    if not host.device.startswith("cuda"):
        return lambda: low.forward(dataclasses.replace(step))
    stream = torch.cuda.Stream(host.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        low.forward(step)
    torch.cuda.synchronize(host.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = low.forward(step)
    low.recheck()

    def replay() -> Tensor:
        graph.replay()
        torch.cuda.synchronize(host.device)
        return logits

    return replay


def _by_output(measurements: list[Measurement]) -> list[list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.output, []).append(measurement)
    return list(groups.values())


def _distance(measurement: Measurement) -> float:
    with contextlib.suppress(TypeError):
        return -measurement.measured if measurement.metric == "cosine" else float(measurement.measured)
    return 0.0
