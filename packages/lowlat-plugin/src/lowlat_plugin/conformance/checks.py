"""What every kernel library must do, one function a promise. A check returns a line of detail, or throws."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from lowlat_plugin import guard
from lowlat_plugin.agreement import ThreadRanks
from lowlat_plugin.conformance.case import Case, load_case
from lowlat_plugin.conformance.reference import ReferenceHost
from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.host import Host
from lowlat_plugin.install import LowLatency, Policy, State
from lowlat_plugin.kernel import BuildContext, Plan, offers
from lowlat_plugin.numerics import measure
from lowlat_plugin.reasons import Code, DeadlineExceeded, Refused
from lowlat_plugin.registry import Candidate, Registry
from lowlat_plugin.routing import Path
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.spec import Bound, KernelSpec, Metric, Mode

if TYPE_CHECKING:
    from torch import Tensor


STRICT_RELATIVE = Bound(Metric.RELATIVE, 0.0)


class CheckResult(msgspec.Struct, frozen=True):
    """`status` is passed, failed or skipped; `detail` says what was measured, what went wrong, or why not run."""

    check: str
    promise: str
    status: str
    detail: str
    seconds: float


class Skipped(Exception):  # noqa: N818 - an answer rather than a fault
    """This check does not apply."""


class Failed(AssertionError):  # noqa: N818 - an answer rather than a fault
    """The promise was not kept."""


Check = Callable[[Candidate], str]
CHECKS: dict[str, Check] = {}


def _check(function: Check) -> Check:
    CHECKS[function.__name__.strip("_")] = function
    return function


def run_check(candidate: Candidate, name: str) -> CheckResult:
    """Run one check; whatever the library throws becomes a failed result."""
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
    return [run_check(candidate, name) for name in CHECKS]


# -- before a device is needed ---------------------------------------------------------------------------------------


@_check
def _declaration(candidate: Candidate) -> str:
    """The spec survives JSON, promises numerics for logits and KV, and lists widths for every device."""
    spec = candidate.spec
    again = msgspec.json.decode(msgspec.json.encode(spec), type=KernelSpec)
    _expect(again == spec, "the spec changes when written as JSON and read back")
    for output in ("logits", "kv"):
        _expect(output in spec.numerics.bounds, f"numerics has no bound for {output}")
    _expect(bool(spec.devices), "no devices are listed")
    return f"{len(spec.devices)} devices, modes {', '.join(sorted(spec.modes))}"


@_check
def _refusals(candidate: Candidate) -> str:
    """Every fact that does not fit is refused by name, several at once are all listed, nothing crashes the guard."""
    facts = _host(load_case(candidate.spec)).facts
    own = guard.check(candidate.spec, facts)
    _expect(not own, f"the example itself is refused: {', '.join(map(str, own))}")
    wrong: dict[str, dict[str, Any]] = {
        Code.VENDOR: {"vendor": "no-such-vendor"},
        Code.ARCHITECTURE: {"architecture": "NoSuchForCausalLM"},
        Code.TENSOR_PARALLEL: {"tensor_parallel": 4099},
        Code.CAPABILITY: {"capabilities": {"a capability of the future": 1}},
        Code.CONTRACT_VERSION: {"contract": 1 << 20},
        Code.DEADLINE_TOO_SHORT: {"watchdog_s": 0.001},
    }
    if "*" not in candidate.spec.devices:
        wrong[Code.ISA] = {"isa": "no-such-isa"}
    if candidate.spec.requires.dtypes is not None:
        wrong[Code.DTYPE] = {"dtype": "no-such-dtype"}
    if candidate.spec.requires.weight_formats is not None:
        wrong[Code.WEIGHT_FORMAT] = {"weight_formats": frozenset({"no-such-format"})}
    if candidate.spec.requires.page_sizes is not None:
        wrong[Code.KV_LAYOUT] = {"page_size": 4099}
    for code, change in wrong.items():
        codes = _codes(candidate.spec, msgspec.structs.replace(facts, **change))
        _expect(code in codes, f"{change} is not refused as {code}")
    early = {Code.VENDOR, Code.ARCHITECTURE, Code.ISA}
    all_at_once = {k: v for code, change in wrong.items() if code not in early for k, v in change.items()}
    codes = _codes(candidate.spec, msgspec.structs.replace(facts, **all_at_once))
    _expect(set(wrong) - early <= codes, f"of several faults at once only {sorted(codes)} are listed")
    return f"{len(wrong)} faults, each named"


# -- one rank --------------------------------------------------------------------------------------------------------


@_check
def _outputs(candidate: Candidate) -> str:
    """Logits, KV and state are within the declared bounds at every width, beside padding, NaN and noisy pages."""
    low = _installed(candidate, _host(load_case(candidate.spec)))
    worst = [m for result in low.results for m in result.measurements]
    _expect(len(low.results) == len(_proved(low)), "not every shape was measured")
    low.close()
    return "; ".join(str(max(group, key=_distance)) for group in _by_output(worst))


@_check
def _precision(candidate: Candidate) -> str:
    """In a 16-bit type the kernels' logits are no farther from those of float32 than the general path's are."""
    import torch

    case = load_case(candidate.spec)
    host = _host(case)
    if case.dtype == "float32":
        raise Skipped("the example computes in float32")
    if not isinstance(host, ReferenceHost):
        raise Skipped("the example brings its own engine")
    wide = {name: tensor.float() for name, tensor in case.weights.items()}
    exact = type(host)(dataclasses.replace(case, dtype="float32", weights=wide))
    low = _installed(candidate, host, prove=False)
    shape = _widest_decode(low)
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
    _expect(kernels <= general, f"{kernels:.3g} from float32, the general path {general:.3g}")
    return f"{kernels:.3g} from float32, the general path {general:.3g}"


@_check
def _weights(candidate: Candidate) -> str:
    """The kernels compute with the weights they were given: other weights, other logits, again within bounds."""
    logits = []
    for seed in (0, 1):
        host = _host(load_case(candidate.spec, seed))
        low = _installed(candidate, host)
        logits.append(_decode_once(low, host))
        low.close()
    _expect(bool((logits[0] != logits[1]).any()), "two models with different weights give the same logits")
    return "two sets of weights, two sets of logits"


@_check
def _replay(candidate: Candidate) -> str:
    """A step runs again from the same buffers with new values in them, and the same values give the same bits."""
    import torch

    host = _host(load_case(candidate.spec))
    low = _installed(candidate, host)
    shape = _widest_decode(low)
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
    _expect(bool((first != second).any()), "new tokens in the same buffer gave the old logits")
    _expect(torch.equal(first, again), "the same step gave other bits the second time")
    return f"{shape}, {'graph' if host.device.startswith('cuda') else 'eager'}, three runs"


@_check
def _fallback(candidate: Candidate) -> str:
    """Prefill and wider steps take the general path, each with its reason; the switch works at once; counters count."""
    low = _installed(candidate, _host(load_case(candidate.spec)))
    shape = _widest_decode(low)
    _expect(low.route(Mode.PREFILL, 1, 64).reason == "prefill", "prefill is not refused by name")
    _expect(low.route(Mode.DECODE, 4096, 4096).reason == "too-wide", "a very wide step is not refused by name")
    covered = low.route(shape.mode, shape.requests, shape.rows)
    low.counters.add(covered)
    low.switch(False)
    off = low.route(shape.mode, shape.requests, shape.rows)
    low.counters.add(off)
    low.switch(True)
    _expect(covered.path is Path.KERNELS and off.reason == "switched-off", "the switch does not switch")
    _expect(low.counters.total(Path.GENERAL) == 1 and low.counters.total(Path.KERNELS) == 1, "counters do not count")
    low.close()
    return "prefill, too-wide, switched-off"


@_check
def _rebinding(candidate: Candidate) -> str:
    """Pools that move without a bind are noticed; after bind the kernels use the new ones only."""
    import torch

    host = _host(load_case(candidate.spec))
    if not isinstance(host, ReferenceHost):
        raise Skipped("the example brings its own engine")
    low = _installed(candidate, host)
    old = host.layers
    host.reallocate()
    for layer in old:
        layer.k_SHD.fill_(float("nan"))
        layer.v_SHD.fill_(float("nan"))
    before = [layer.k_SHD.clone() for layer in old]
    low.bind()
    low.prove()
    _expect(low.state is State.ACTIVE, f"not active after re-binding: {low.report().reasons}")
    untouched = all(torch.equal(a.isnan(), b.k_SHD.isnan()) for a, b in zip(before, old, strict=True))
    _expect(untouched, "the old pools were written after bind")
    low.close()
    return f"{len(old)} layers moved"


@_check
def _suspension(candidate: Candidate) -> str:
    """Suspend and resume, where offered, end in the same promise kept; close may be called twice."""
    low = _installed(candidate, _host(load_case(candidate.spec)))
    kernel = low.kernel
    assert kernel is not None
    low.suspend()
    low.resume()
    _expect(low.state is State.ACTIVE, f"not active after resume: {low.report().reasons}")
    detail = "memory is given back" if offers(kernel, "suspend") else "memory is kept"
    low.close()
    low.close()
    return f"suspend: {detail}; closed twice"


@_check
def _updates(candidate: Candidate) -> str:
    """After a weight update the kernels are proven again, or disabled by name; never stale."""
    host = _host(load_case(candidate.spec))
    low = _installed(candidate, host)
    kernel = low.kernel
    assert kernel is not None
    low.policy = Policy.AUTO
    low.refresh()
    if offers(kernel, "refresh"):
        ok = low.state is State.ACTIVE or any(r.code == Code.WEIGHTS_UPDATED for r in low.report().reasons)
        _expect(ok, f"neither active nor disabled by name after refresh: {low.report().reasons}")
        return "refreshed" if low.state is State.ACTIVE else "disabled by name"
    _expect(any(r.code == Code.WEIGHTS_UPDATED for r in low.report().reasons), "stale weights are not named")
    return "disabled by name"


# -- two ranks -------------------------------------------------------------------------------------------------------


@_check
def _agreement(candidate: Candidate) -> str:
    """Two ranks make the same plan; when the probe of one throws, both refuse and name the rank."""
    ranks = ThreadRanks(2)
    case = load_case(candidate.spec)
    if case.host is not None:
        raise Skipped("the example brings its own engine")
    hosts = [ReferenceHost(case, ranks.of(rank)) for rank in range(2)]
    lows = _on_all([lambda host=host: _installed(candidate, host, prove=False) for host in hosts])  # type: ignore[misc]
    _expect(all(isinstance(low, LowLatency) for low in lows), f"two well ranks do not agree: {lows}")
    for low in lows:
        low.close()
    outcomes = _on_all(
        [lambda host=host: _installed(candidate, host, False, broken=host.agreement.rank == 1) for host in hosts]  # type: ignore[misc]
    )
    named = [isinstance(o, Refused) and any(r.rank == 1 for r in o.reasons) for o in outcomes]
    _expect(all(named), f"a probe that throws on rank 1 gave {outcomes}")
    return "equal plans; a broken rank stops both"


@_check
def _deadline(candidate: Candidate) -> str:
    """A rank stays away: within twice the deadline every rank raises DeadlineExceeded, and the next step runs."""
    case = load_case(candidate.spec)
    if case.group is None:
        raise Skipped("the example has one rank; give Case.group to check waits")
    hosts = case.group(2)
    lows = _on_all([lambda host=host: _installed(candidate, host) for host in hosts])  # type: ignore[misc]
    _expect(all(isinstance(low, LowLatency) for low in lows), f"two ranks could not be built: {lows}")
    started = time.monotonic()
    early = _on_all([lambda: _raw_step(lows[0], hosts[0])])[0]
    waited = time.monotonic() - started
    late = _on_all([lambda: _raw_step(lows[1], hosts[1])])[0]
    _expect(isinstance(early, DeadlineExceeded), f"the waiting rank gave {early!r}")
    _expect(isinstance(late, DeadlineExceeded), f"the late rank gave {late!r}")
    _expect(waited <= 2 * case.deadline_s, f"the wait took {waited:.2f} s, the deadline is {case.deadline_s:g} s")
    together = _on_all([lambda low=low, host=host: _raw_step(low, host) for low, host in zip(lows, hosts)])  # type: ignore[misc]
    _expect(not any(isinstance(o, BaseException) for o in together), f"the next step failed: {together}")
    return f"both ranks gave up by name after {waited:.2f} s of {case.deadline_s:g} s; the next step ran"


# -- helpers ---------------------------------------------------------------------------------------------------------


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise Failed(message)


def _codes(spec: KernelSpec, facts: EngineFacts) -> set[str]:
    return {reason.code for reason in guard.check(spec, facts)}


def _host(case: Case) -> Host:
    return case.host(case) if case.host is not None else ReferenceHost(case)


def _installed(candidate: Candidate, host: Host, prove: bool = True, broken: bool = False) -> LowLatency:
    registry = Registry()
    registry.register(candidate.spec, candidate.distribution, candidate.version)
    low = LowLatency(host, registry, Policy.REQUIRE)
    low.choose()
    if broken and low.kernel is not None:
        low.kernel.probe = _broken_probe  # type: ignore[method-assign]
    low.build()
    low.bind()
    if prove:
        low.prove()
    return low


def _broken_probe(context: BuildContext) -> Plan:
    raise RuntimeError("made to fail by the conformance kit")


def _proved(low: LowLatency) -> set[str]:
    assert low.table is not None
    return {result.shape for result in low.results}


def _widest_decode(low: LowLatency) -> Any:
    assert low.table is not None
    shapes = [shape for shape in low.table.covered if shape.mode is Mode.DECODE]
    if not shapes:
        raise Skipped("no decode shapes are covered")
    return shapes[-1]


def _decode_once(low: LowLatency, host: Host) -> Tensor:
    import torch

    with torch.inference_mode():
        shape = _widest_decode(low)
        return low.forward(Shadow(host, [shape], seed=5).step(shape)).clone()


def _raw_step(low: LowLatency, host: Host) -> Tensor:
    """A step without the safety net of `LowLatency.forward`, so that the library's own error is seen."""
    import torch

    assert low.kernel is not None
    with torch.inference_mode():
        shape = _widest_decode(low)
        step = Shadow(host, [shape], seed=5, prefill=False).step(shape)
        logits = low.kernel.forward(step)
        host.synchronize()
        return logits


def _recorded(host: Host, low: LowLatency, step: Any) -> Callable[[], Tensor]:
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


def _by_output(measurements: list[Any]) -> list[list[Any]]:
    groups: dict[str, list[Any]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.output, []).append(measurement)
    return list(groups.values())


def _distance(measurement: Any) -> float:
    with contextlib.suppress(TypeError):
        return -measurement.measured if measurement.metric == "cosine" else float(measurement.measured)
    return 0.0
