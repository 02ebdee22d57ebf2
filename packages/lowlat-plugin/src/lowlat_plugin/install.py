"""The life of kernels in one engine: chosen, built, bound, proven, dispatched to, switched, closed.

    choose -> observe* -> build -> bind -> prove -> (capture -> recheck) -> route, forward* -> refresh, suspend, close

The host calls these in that order. Each ends in agreement over the ranks, so that all ranks take the same way. Under
`auto` a refusal leaves the general path in charge and is kept for the report; under `require` it is raised.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from lowlat_plugin import guard
from lowlat_plugin.agreement import digest, settle
from lowlat_plugin.choosing import Choice, choose
from lowlat_plugin.facts import deadline_for
from lowlat_plugin.host import Host
from lowlat_plugin.kernel import BuildContext, Kernel, Plan, Workspace, offers
from lowlat_plugin.proving import prove_shapes, worth_proving
from lowlat_plugin.reasons import Code, Reason, Refused, StepFailed, raised
from lowlat_plugin.registry import Candidate, Registry
from lowlat_plugin.report import CandidateReport, Report
from lowlat_plugin.routing import FAILED, NO_KERNELS, OFF, SUSPENDED, SWITCHED_OFF, Counters, Route, RoutingTable
from lowlat_plugin.shadow import LENGTHS, Shadow, ShapeResult
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Shape, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
log = logging.getLogger("lowlat.plugins")


class Policy(StrEnum):
    """`--low-latency`: never, when it fits, or start only if it fits. DIAGNOSE never raises, named or not."""

    OFF = "off"
    AUTO = "auto"
    REQUIRE = "require"
    DIAGNOSE = "diagnose"


class State(StrEnum):
    """How far kernels have come. Steps go to them while they are ACTIVE; FAILED and CLOSED are ends."""

    NONE = "none"
    CHOSEN = "chosen"
    BUILT = "built"
    BOUND = "bound"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    FAILED = "failed"
    CLOSED = "closed"


class LowLatency:
    """One engine's low-latency path. `name` picks a library and makes it required, as `--kernels NAME` does."""

    def __init__(self, host: Host, registry: Registry, policy: Policy = Policy.AUTO, name: str | None = None) -> None:
        self.host = host
        self.policy = Policy.REQUIRE if name and policy is Policy.AUTO else policy
        self.name = name
        self.state = State.NONE
        self.counters = Counters()
        self.deadline_s = deadline_for(host.facts.watchdog_s)
        self.switched_on = True
        self.kernel: Kernel | None = None
        self.candidate: Candidate | None = None
        self.table: RoutingTable | None = None
        self.results: tuple[ShapeResult, ...] = ()
        self._registry = registry
        self._tried: tuple[CandidateReport, ...] = ()
        self._failure: tuple[Reason, ...] = ()
        self._context: BuildContext | None = None
        self._plan: Plan | None = None
        self._seal: tuple[int, ...] = ()

    # -- before weights ----------------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Find the first candidate that fits the facts. Raises Refused when one is required and none does."""
        if self.policy is Policy.OFF:
            return
        subject = self.name or "low-latency kernels"
        for failure in self._registry.failures:
            log.warning("%s could not be loaded: %s", failure.distribution, failure.reason)
        choice = self._staged(subject, "choose", self._choose, lambda choice: choice.key)
        if choice is None:
            return
        if choice.kernel is None:
            log.info("%s", choice.none_fits(self.host.facts))
        else:
            self.state = State.CHOSEN

    def _choose(self) -> Choice:
        choice = choose(self._registry, self.host.facts, self.name)
        self.kernel, self.candidate, self._tried = choice.kernel, choice.candidate, choice.tried
        if self.kernel is None and self.policy is Policy.REQUIRE:
            raise Refused(self.name or "low-latency kernels", choice.why_none(self._registry))
        return choice

    def observe(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass a checkpoint's tensors through, showing each to the kernels as it is stored."""
        for name, tensor in weights:
            if self.kernel is not None:
                try:
                    self.kernel.observe_weight(name, tensor)
                except Exception as error:
                    self._failure += (raised(f"{self.kernel.spec.name}: observe_weight({name})", error),)
            yield name, tensor

    # -- after weights, before pools ---------------------------------------------------------------------------------

    def build(self) -> None:
        """Guard the loaded model, probe, agree, build. All memory the kernels will ever have is taken here."""
        if self.state is not State.CHOSEN:
            return
        kernel, name = self._kernel(), self._kernel().spec.name
        if self._staged(name, "probe", self._probe, lambda plan: digest(plan.identity())) is None:
            return
        workspace = self._built_context().workspace

        def build() -> str:
            try:
                kernel.build(self._built_context())
            finally:
                workspace.close()
            return name

        if self._staged(name, "build", build) is not None:
            self.state = State.BUILT
            log.info("%s built, %.1f MB: %s", name, workspace.taken_bytes / 1e6, kernel.summary())

    def _probe(self) -> Plan:
        kernel = self._kernel()
        if self._failure:
            raise Refused(kernel.spec.name, self._failure)
        self._context = self.host.context(kernel.spec, Workspace(self.host.device))
        reasons = guard.check_model(kernel, self._context)
        if reasons:
            raise Refused(kernel.spec.name, reasons)
        self._plan = kernel.probe(self._context)
        faults = guard.check_plan(kernel.spec, self._plan, self._context)
        if faults:
            raise Refused(kernel.spec.name, faults)
        return self._plan

    # -- after pools -------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Hand over addresses and agree on the routing table. Call again whenever a pool has moved."""
        if self.state not in (State.BUILT, State.BOUND, State.ACTIVE):
            return
        name = self._kernel().spec.name
        table = self._staged(name, "routing", self._bind, RoutingTable.digest)
        if table is None:
            return
        if self.table is None or self.table.layout != table.layout:
            self.table = table
        self.state = State.BOUND if self.state is State.BUILT else self.state

    def _bind(self) -> RoutingTable:
        binding = self.host.binding()
        self._kernel().bind(binding)
        self._seal = binding.addresses()
        most = self._built_context().max_requests
        possible = [shape for shape in self._planned().shapes if shape.requests <= most]
        return RoutingTable(possible, binding.layout.key())

    def prove(self, shapes: Iterable[Shape] | None = None, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> None:
        """Shadow check. By default every covered shape of decode, and for verify the widest of each number of requests.

        A distance beyond its bound disables that shape (`auto`) or refuses (`require`); anything else wrong refuses.
        """
        if self.state not in (State.BOUND, State.ACTIVE):
            return
        import torch

        self.results = ()
        table, name = self.table, self._kernel().spec.name
        assert table is not None
        chosen = tuple(sorted(shapes)) if shapes is not None else worth_proving(table.covered)
        with torch.inference_mode():
            shadow = self._staged(name, "shadow contexts", lambda: Shadow(self.host, chosen, lengths, seed))
            if shadow is None:
                return
            self.results = prove_shapes(shadow, self._kernel(), table, chosen, self.deadline_s)
            misses = [reason for result in self.results for reason in result.reasons]
            # A device whose queue hangs would keep whoever waits for it.
            if self.host.device.startswith("cpu") or not _hangs(misses):
                shadow.close()
        fatal = [reason for reason in misses if self.policy is Policy.REQUIRE or reason.code != Code.NUMERICS]
        if fatal or not table.covered:
            self._fail(name, misses or [Reason(Code.BAD_PLAN, "covered shapes", "none", "at least one")])
            return
        self.state = State.ACTIVE
        log.info("%s active for %s", name, ", ".join(map(str, table.covered)))

    # -- serving -----------------------------------------------------------------------------------------------------

    def route(self, mode: Mode, requests: int, rows: int) -> Route:
        """Who computes a step of this shape. Cheap, and needs nothing from the device."""
        if self.state is not State.ACTIVE or self.table is None:
            if self.policy is Policy.OFF:
                return OFF
            return {State.FAILED: FAILED, State.SUSPENDED: SUSPENDED}.get(self.state, NO_KERNELS)
        if not self.switched_on:
            return SWITCHED_OFF
        return self.table.route(mode, requests, rows)

    def forward(self, step: StepInputs) -> Tensor:
        """Run the kernels on a step that `route` gave to them.

        Raises StepFailed after disabling the kernels if they throw, or if pools moved and were not bound again.
        """
        binding = self.host.binding()
        if binding.addresses() != self._seal:
            raise self._failed_step(
                Reason(Code.POOLS_MOVED, "KV pools", "addresses changed since bind", "bind() again")
            )
        try:
            return self._kernel().forward(step)
        except Exception as error:
            raise self._failed_step(raised(f"{self._kernel().spec.name} step {step.shape}", error)) from error

    def check(self) -> None:
        """Ask the kernels about a step whose logits hold NaN. Raises StepFailed, after disabling them, if they failed.

        NaN without a fault is the model's own. Waits for the device.
        """
        if self.kernel is None or self.state is not State.ACTIVE:
            return
        try:
            fault = self.kernel.fault()
        except Exception as error:
            fault = error
        if fault is not None:
            raise self._failed_step(raised(f"{self.kernel.spec.name} on the device", fault)) from fault

    def features(self) -> Tensor:
        """States of the last `forward`'s rows after the tapped layers, [R, taps * hidden size].

        Raises StepFailed after disabling the kernels if they give none.
        """
        found = self._kernel().state().get("features")
        if found is None:
            raise self._failed_step(Reason(Code.NUMERICS, "state features", "not given by the kernels", "given"))
        return found

    def _failed_step(self, reason: Reason) -> StepFailed:
        self._failure += (reason,)
        self.state = State.FAILED
        log.error("low-latency kernels disabled: %s", reason)
        return StepFailed(reason)

    def recheck(self) -> None:
        """After each capture: the plan is the one agreed on, pools are where they were, no memory was taken late."""
        if self.state not in (State.BOUND, State.ACTIVE):
            return
        self._staged(self._kernel().spec.name, "recheck", self._recheck)

    def _recheck(self) -> str:
        kernel = self._kernel()
        now = kernel.probe(self._built_context())
        if now.identity() != self._planned().identity():
            found = ", ".join(map(str, sorted(now.shapes ^ self._planned().shapes))) or "other memory"
            wanted = "the plan agreed on at start"
            raise Refused(kernel.spec.name, [Reason(Code.PLAN_CHANGED, "plan", f"different: {found}", wanted)])
        if self.host.binding().addresses() != self._seal:
            found = "addresses changed since bind"
            raise Refused(kernel.spec.name, [Reason(Code.POOLS_MOVED, "KV pools", found, "bind() after every move")])
        return kernel.spec.name

    def switch(self, on: bool) -> None:
        """Send every step to the general path, or back. Takes effect at the next step."""
        if on != self.switched_on:
            log.info("low-latency path switched %s", "on" if on else "off")
        self.switched_on = on

    # -- changes -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over updated weights and prove them again; kernels that cannot are disabled by name."""
        if self.state is not State.ACTIVE:
            return
        kernel = self._kernel()
        if not offers(kernel, "refresh"):
            hint = "restart to build the kernels from the new weights"
            self._fail(kernel.spec.name, [Reason(Code.WEIGHTS_UPDATED, "weights", "updated", "unchanged", hint)])
            return
        if self._staged(kernel.spec.name, "refresh", lambda: self._rebuilt(kernel.refresh)) is not None:
            self.bind()
            self.prove()

    def suspend(self) -> None:
        """Before device memory is released. Kernels that cannot give theirs back keep it and are bound again."""
        if self.state is not State.ACTIVE:
            return
        kernel = self._kernel()
        if (
            offers(kernel, "suspend")
            and self._staged(kernel.spec.name, "suspend", lambda: _done(kernel.suspend)) is None
        ):
            return
        self.state = State.SUSPENDED

    def resume(self) -> None:
        """After device memory is back: rebuild what was given up, bind the new addresses, prove again."""
        if self.state is not State.SUSPENDED:
            return
        kernel = self._kernel()
        rebuild = lambda: self._rebuilt(kernel.resume)  # noqa: E731
        if offers(kernel, "resume") and self._staged(kernel.spec.name, "resume", rebuild) is None:
            return
        self.state = State.ACTIVE
        self.bind()
        self.prove()

    def _rebuilt(self, method: Callable[[BuildContext], None]) -> str:
        context = self.host.context(self._kernel().spec, Workspace(self.host.device))
        self._context = context
        try:
            method(context)
        finally:
            context.workspace.close()
        return "done"

    def close(self) -> None:
        """Give everything back. Safe at any time and more than once."""
        if self.kernel is not None and self.state is not State.CLOSED and not _hangs(self._failure):
            with contextlib.suppress(Exception):
                self.kernel.close()
        self.state = State.CLOSED

    # -- looking -----------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Everything `doctor`, the log line and the admin route show."""
        table = self.table
        return Report(
            policy=self.policy.value,
            state=self.state.value,
            on=self.switched_on,
            kernels=self.candidate.key if self.candidate else None,
            covered=tuple(map(str, table.covered)) if table and self.state is State.ACTIVE else (),
            disabled={str(shape): why for shape, why in table.disabled.items()} if table else {},
            reasons=self._failure,
            candidates=self._tried,
            failures=tuple(self._registry.failures),
            shadow=self.results,
            steps=[(path, reason, count) for (path, reason), count in self.counters.snapshot().items()],
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _staged(
        self, subject: str, stage: str, work: Callable[[], T], identity: Callable[[T], str] = lambda _: ""
    ) -> T | None:
        try:
            return settle(self.host.agreement, subject, stage, work, identity)
        except Refused as refusal:
            self._fail(subject, refusal.reasons)
            return None

    def _fail(self, subject: str, reasons: Iterable[Reason]) -> None:
        fresh = [reason for reason in reasons if reason not in self._failure]
        self._failure += tuple(fresh)
        self.state = State.FAILED
        # What a kernel that never came back still works on must stay where it is.
        if self.kernel is not None and not _hangs(self._failure):
            with contextlib.suppress(Exception):
                self.kernel.close()
        if self.policy is Policy.REQUIRE:
            raise Refused(subject, self._failure)
        log.warning("%s", Refused(subject, self._failure))

    def _kernel(self) -> Kernel:
        assert self.kernel is not None
        return self.kernel

    def _planned(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def _built_context(self) -> BuildContext:
        assert self._context is not None
        return self._context


def _hangs(reasons: Iterable[Reason]) -> bool:
    return any(reason.code == Code.DEADLINE for reason in reasons)


def _done(method: Callable[[], None]) -> str:
    method()
    return "done"
