"""The runner of GPUs: slots' states live on the device, and the host queues steps without waiting for any.

A decode step is one body over tensors that stay where they are: a CUDA graph for each sampling mode and padded number
of requests (`graphs`), or the same operations one by one. Of steps with prompt chunks the layers are such a body
(`device_chunks`). What the device cannot do (grammars, log-probabilities of whole prompts) goes to `ModelRunner`, after
all steps in flight: correct, but slower, and counted in `fallbacks`.

Legend of shape suffixes: R rows, B padded requests, M samples.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PlanLimits, StepPlan
from lowlat.engine.device_choice import GroupChoice
from lowlat.engine.device_chunks import ChunkBodies, ChunkRows, chunk_rows, read_labels
from lowlat.engine.device_decodes import DecodeBodies, padded_requests
from lowlat.engine.device_kernels import DeviceKernels
from lowlat.engine.device_results import LabelReads, PendingStep
from lowlat.engine.device_sampler import Samples, SamplingMode
from lowlat.engine.device_speculation import DeviceSpeculation
from lowlat.engine.device_state import DeviceState, SlotLists, to_device
from lowlat.engine.device_verify import PendingChecks, Verifier
from lowlat.engine.executor import StepResult
from lowlat.engine.graphs import Body, EagerBodies, StepBodies
from lowlat.engine.host_slots import HostSlots
from lowlat.engine.logit_rules import LogitRules
from lowlat.engine.runner import ModelRunner
from lowlat.layers.verify import SlotTables
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.speculative.proposer import DraftRequest
from lowlat_plugin import LowLatency, StepFailed
from lowlat_plugin.routing import FAILED

log = logging.getLogger("lowlat.engine")


@dataclass(slots=True)
class Flight:
    """A launched step: its plan, and the lengths of its slots before it."""

    plan: StepPlan
    lengths: dict[int, int]
    pending: PendingStep


class DeviceRunner:
    """Runs one model on one device, step after step."""

    def __init__(self, model: DeviceDecoder, host: ModelRunner, limits: PlanLimits, bodies: StepBodies) -> None:
        """`host` runs the same model on the same cache; it has run no step yet."""
        assert isinstance(host.kv, KVPool)
        layout = host.kv.layout
        self.kv = host.kv
        self.device = self.kv.keys[0].device
        self.model = model
        self.host = host
        self.max_pages = limits.max_pages
        self.bodies = bodies
        self.fallbacks: Counter[str] = Counter()
        """Steps that the host ran, by the reason."""
        self.chosen: dict[str, str] = {}
        """Which kernels the start chose by their times, and those times (`row_kernels`)."""
        self.kernels: DeviceKernels | None = None
        """Where a kernel library computes decode steps: set by `use_kernels`."""
        self._most = limits.max_batch
        self._state = DeviceState(limits, layout, model.vocab_size, self.device)
        rows = chunk_rows(limits.max_rows) + limits.max_batch
        chunks = bodies if model.capturable(rows) else EagerBodies()
        self._chunks = ChunkBodies(model, self.kv, self._state, chunks)
        self._lists = SlotLists(self._state.padding_slot, self.device)
        self.choice = GroupChoice(model, host.communicator, self._state)
        self.decodes = DecodeBodies(model, self.kv, self._state, self._lists, bodies, self.choice)
        self.verifier: Verifier | None = None
        """Where steps check guesses."""
        self._slots = HostSlots(limits.max_batch)
        self._in_flight: deque[Flight] = deque()

    def speculate(self, speculation: DeviceSpeculation) -> None:
        """Let decode steps check guesses from now on."""
        self.verifier = Verifier(self.model, self.kv, self._state, self._lists, self.bodies, speculation)

    @property
    def tables(self) -> SlotTables:
        """The slots' state on the device, for drafts."""
        return self._state.slots

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for it."""
        result = self.launch(plan).wait()
        assert result is not None
        return result

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step. Slots' states advance at once, as far as the next launch is concerned."""
        for slot, sampling in plan.begins:
            self._slots.settings[slot] = sampling
            self._state.begin(slot, sampling, LogitRules.has(sampling) and self.host.rank == 0)
            if self.verifier is not None:
                self.verifier.speculation.begin(slot, sampling)
        self._state.table.update(plan.pages)
        if self._state.window_table is not None:
            self._state.window_table.update(plan.windows)
        reason = self._host_only(plan)
        if reason is not None:
            return self._run_on_host(plan, reason)
        self.host.learn(plan)
        slots = [chunk.slot for chunk in plan.chunks] + plan.decodes
        before = {slot: self._slots.lengths[slot] for slot in slots}
        if self.host.kernel_steps is not None and (plan.chunks or self.kernels is None):
            self.host.kernel_steps.count(plan)
        if plan.chunks:
            pending = self._launch_chunks(plan)
        elif self.verifier is not None:
            pending = self._launch_checks(plan, self.verifier)
        else:
            kernels = self.kernels
            pending = (kernels and self._try_kernels(plan, kernels)) or self._launch_decodes(plan)
        while self._in_flight and self._in_flight[0].pending.known:
            self._in_flight.popleft()
        self._in_flight.append(Flight(plan, before, pending))
        return pending

    def use_kernels(self, low: LowLatency, modes: list[SamplingMode]) -> None:
        """Let a library that was proven compute the decode steps that it covers; captures them in these modes."""
        self.kernels = DeviceKernels(low, self._state, self.model.ops)
        try:
            with torch.inference_mode():
                if self.verifier is not None:
                    self.verifier.use_kernels(self.kernels, self._sizes(), modes)
                else:
                    self.decodes.use_kernels(self.kernels, self.kernels.sizes(self._most), modes)
        except StepFailed:
            return  # the library is disabled, and has said why
        low.recheck()

    def _sizes(self) -> list[int]:
        """Padded numbers of requests, the largest first."""
        return sorted({padded_requests(requests, self._most) for requests in range(1, self._most + 1)}, reverse=True)

    def prepare(self, modes: list[SamplingMode]) -> None:
        """Capture the decode steps of every size in these modes, so that no request waits for it."""
        with torch.inference_mode():
            (self.verifier or self.decodes).prepare(self._sizes(), modes)

    def prepare_chunks(self, rows: int) -> None:
        """Capture steps with prompt chunks of up to so many tokens."""
        with torch.inference_mode():
            self._chunks.prepare(rows)

    def seconds(self, chunk_rows: int) -> float:
        """What a prepared greedy step of one request takes, or where `chunk_rows` is not 0, one with such a chunk of no
        length: all but its attention. The best of three."""
        with torch.inference_mode():
            best = math.inf
            for _ in range(3):
                self._synchronize()
                started = time.perf_counter()
                if chunk_rows:
                    self._chunks.replay(chunk_rows)
                else:
                    (self.verifier or self.decodes).replay(1, SamplingMode())
                self._synchronize()
                best = min(best, time.perf_counter() - started)
        return best

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def captured_step(self, slots: list[int]) -> tuple[Callable[[], object], Callable[[], object]]:
        """For measurements: replays the decode step of these slots, which advances them, and the same one by one.

        The slots have decoded in this very set before. What the host knows of their lengths is not changed.
        """
        mode, plan = self._slots.mode(slots), StepPlan(0, [], [], [], slots)
        kernels = self.kernels
        padded, longest = padded_requests(len(slots), self._most), max(self._slots.lengths[slot] for slot in slots) + 1
        if self.verifier is not None:
            width = self.verifier.speculation.width
            on_kernels = kernels is not None and kernels.route(plan, padded, width).kernels
            # The operations may run a few times, and each may bring `width` tokens.
            return self._replayed(*self.verifier.body(padded, width, mode, longest + 4 * width, on_kernels))
        on_kernels = kernels is not None and kernels.route(plan).kernels
        size = len(slots) if on_kernels else padded
        return self._replayed(*self.decodes.body(size, mode, longest, on_kernels=on_kernels))

    def _replayed(self, key: Hashable, body: Body) -> tuple[Body, Body]:
        return (lambda: self.bodies.run(key, body)), body

    # --- steps of decodes alone --------------------------------------------------------------------------------------

    def _launch_decodes(self, plan: StepPlan) -> PendingStep:
        slots = plan.decodes
        for slot in slots:
            self._slots.lengths[slot] += 1
        size, longest = padded_requests(len(slots), self._most), self._slots.longest(slots)
        samples = self.decodes.run(slots, size, self._slots.mode(slots), longest)
        return self._pending(plan, samples, slots)

    # --- those that check guesses -------------------------------------------------------------------------------------

    def _launch_checks(self, plan: StepPlan, verifier: Verifier) -> PendingStep:
        """A step that checks guesses. Of those in flight it is not known how many tokens they bring."""
        speculation = verifier.speculation
        launched = speculation.clock()
        slots, settings = plan.decodes, [self._slots.settings[slot] for slot in plan.decodes]
        size = padded_requests(len(slots), self._most)
        requests = [
            DraftRequest(self._slots.tokens[slot], self._slots.lengths[slot], slot, self._slots.room(slot) - 1)
            for slot in slots
        ]
        forced = None if speculation.simulated is None else speculation.simulate(requests)
        width = speculation.plan(requests, size)
        for slot in slots:
            self._slots.flying[slot] += width
        longest = self._slots.longest(slots)
        step = (slots, size, width, self._slots.mode(slots), longest, forced)
        checked, again = None, None
        if self.kernels is not None:
            route = self.kernels.route(plan, size, width)
            if route.kernels:
                try:
                    checked, again = verifier.run(*step, on_kernels=True), self._run_again
                except StepFailed:
                    self._alone()
                    log.warning("step %d runs on the general path", plan.step)
                    route = FAILED
            self.kernels.low.counters.add(route)
        if checked is None:
            checked = verifier.run(*step)
        observers = [self.host.observer(slot) for slot in slots]

        def done(bursts: list[list[int]], rows: list[int]) -> tuple[float, float]:
            for index, (slot, burst) in enumerate(zip(slots, bursts, strict=True)):
                self._slots.flying[slot] -= width
                self._slots.grow(slot, len(burst))
                self._slots.note(slot, burst, observers[index])
                if settings[index].width > 1:
                    speculation.judge(slot, burst, rows[index], width)
            return speculation.time_step(launched, size, width)

        wanted = [setting.logprobs for setting in settings]
        return PendingChecks(plan.step, checked, slots, wanted, self.device, done, again, fetch=self.model.ops.fetch)

    def _settle(self) -> None:
        """Wait for all steps in flight."""
        for flight in list(self._in_flight):
            flight.pending.wait()
        self._in_flight.clear()

    # --- those that a kernel library computes -------------------------------------------------------------------------

    def _try_kernels(self, plan: StepPlan, kernels: DeviceKernels) -> PendingStep | None:
        """Launch a step of decodes on the library, and count who computes it; None where the general path must."""
        route, slots = kernels.route(plan), plan.decodes
        samples = None
        if route.kernels:
            mode, longest = self._slots.mode(slots), self._slots.longest(slots) + 1
            try:
                samples = self.decodes.run(slots, len(slots), mode, longest, on_kernels=True)
            except StepFailed:
                self._alone()
                log.warning("step %d runs on the general path", plan.step)
                route = FAILED
        kernels.low.counters.add(route)
        if samples is None:
            return None
        for slot in slots:
            self._slots.lengths[slot] += 1
        return self._pending(plan, samples, slots, again=self._run_again)

    def _alone(self) -> None:
        """Other ranks cannot be asked to begin a step again (decision 0303): with some, this is the engine's end."""
        if self.host.communicator.shard.size > 1:
            assert self.kernels is not None
            raise StepFailed(self.kernels.low.report().reasons[-1])

    @torch.inference_mode()
    def _run_again(self, failed: PendingStep) -> bool:
        """A step of the library came back without numbers. If it has failed, that step and all launched after it run
        again on the general path, from the states before it; false where the numbers are the model's own."""
        assert self.kernels is not None
        if not self.kernels.failed():
            return False
        self._alone()
        flights = list(self._in_flight)
        while flights[0].pending is not failed:
            del flights[0]
        self._in_flight.clear()
        before: dict[int, int] = {}
        for flight in reversed(flights):
            before |= flight.lengths
        if self.verifier is not None:
            # Lengths are those of the steps whose results are known: before the one that failed.
            before = {slot: self._slots.lengths[slot] for slot in before}
            for slot in before:
                self._slots.flying[slot] = 0
        slots = list(before)
        for slot, length in before.items():
            self._slots.lengths[slot] = length
            answer = self.host.answer_counts(slot)
            if answer is not None and self._state.rules is not None:
                self._state.rules.set_counts(slot, answer)
        self._state.rewind(slots, [self._slots.tokens[slot] for slot in slots], list(before.values()))
        log.warning("steps %d to %d run again on the general path", flights[0].plan.step, flights[-1].plan.step)
        for flight in flights:
            flight.pending.replace(self.launch(flight.plan))
        return True

    # --- steps with prompt chunks ------------------------------------------------------------------------------------

    def _launch_chunks(self, plan: StepPlan) -> PendingStep:
        if self.verifier is not None and plan.decodes:
            self._settle()  # where rows stand is told by the host here, and in flight are guesses
        rows = ChunkRows(plan, self._slots.lengths, self._state.padding_slot, self._chunks.rounded)
        touched = [chunk.slot for chunk in plan.chunks] + plan.decodes
        lasts, reads, first = [], [], 0
        for chunk in plan.chunks:
            reads += [first + row for row in chunk.read_rows]
            first += len(chunk.tokens)
            lasts += [first - 1] if chunk.sample else []
            self._slots.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        for slot in plan.decodes:
            self._slots.grow(slot, 1)
        sampled = [chunk.slot for chunk in plan.chunks if chunk.sample] + plan.decodes
        counts = [len(touched), len(touched), len(sampled), len(sampled), len(sampled)]
        after = [self._slots.lengths[slot] for slot in touched], [self._slots.lengths[slot] for slot in sampled]
        numbers = self._send([*touched, *after[0], *lasts, *rows.decode_rows, *sampled, *after[1]])
        touched_M, lengths_M, rows_M, sampled_M, after_M = torch.split(numbers, counts)
        states_RH = self._chunks.states(rows)
        self._state.lengths_T.index_copy_(0, touched_M, lengths_M)
        samples = None
        if sampled:
            columns_MC = self.model.head(states_RH.index_select(0, rows_M))
            samples = self.choice.take(columns_MC, sampled_M, after_M, self._slots.mode(sampled))
        labels = read_labels(self.model, plan, states_RH, reads, self._send, all_labels=self.host.rank == 0)
        return self._pending(plan, samples, sampled, labels)

    def _send(self, numbers: list[int]) -> torch.Tensor:
        return to_device(numbers, torch.int64, self.device)

    # --- both --------------------------------------------------------------------------------------------------------

    def _pending(
        self,
        plan: StepPlan,
        samples: Samples | None,
        slots: list[int],
        reads: LabelReads | None = None,
        again: Callable[[PendingStep], bool] | None = None,
    ) -> PendingStep:
        observers = [self.host.observer(slot) for slot in slots]

        def done(tokens: list[int]) -> None:
            if self.model.sums is not None:
                self.model.sums.check()
            for slot, token, observe in zip(slots, tokens, observers, strict=True):
                burst = [token] if token >= 0 else []
                self._slots.note(slot, burst, observe)

        wanted, fetch = self._slots.logprobs(slots), self.model.ops.fetch
        if samples is not None:
            samples = samples.fetched(len(slots), fetch)
        if reads is not None:
            reads = LabelReads(fetch(reads.values), reads.chunks)
        return PendingStep(plan.step, samples, slots, wanted, self.device, done, reads, again)

    # --- what the device cannot do -----------------------------------------------------------------------------------

    def _host_only(self, plan: StepPlan) -> str | None:
        """Why the host must run this step; None where the device can."""
        if any(chunk.targets for chunk in plan.chunks):
            return "prompt log-probabilities"
        slots = [chunk.slot for chunk in plan.chunks] + plan.decodes
        if any(self._slots.settings[slot].grammar is not None for slot in slots):
            return "grammar"
        return None

    def _run_on_host(self, plan: StepPlan, reason: str) -> PendingStep:
        self._settle()
        if not self.fallbacks[reason]:
            log.warning("steps with %s wait for the device and choose tokens on the host: they are slower", reason)
        self.fallbacks[reason] += 1
        self.host.set_state(self._slots.tokens, self._slots.lengths)
        result = self.host.run(plan)
        sampled = [chunk.slot for chunk in plan.chunks if chunk.sample] + plan.decodes
        touched = [chunk.slot for chunk in plan.chunks] + plan.decodes
        self._slots.tokens, self._slots.lengths = self.host.state()
        self._state.set_lengths(touched, [self._slots.lengths[slot] for slot in touched])
        if sampled:
            self._state.set_tokens(sampled, [self._slots.tokens[slot] for slot in sampled])
        return PendingStep.finished(result)
