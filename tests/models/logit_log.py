"""What a device runner's logits were, request by request and place by place, whichever body made them.

Legend of shape suffixes: N requests, P places, V vocabulary, M samples of a step.
"""

from __future__ import annotations

from typing import Any

import torch

from lowlat.engine.batch import SlotSampling
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.device_sampler import Samples, SamplingMode


class LogitLog:
    """Writes the logits of every choice into one tensor on the device, from inside graphs too.

    Made before a runner has captured anything. Requests are numbered in the order in which they take a slot after
    `start`.
    """

    def __init__(self, runner: DeviceRunner, requests: int, places: int) -> None:
        device, vocabulary, slots = runner.device, runner.model.vocab_size, runner._state.padding_slot + 1
        assert not runner.bodies.captured, "graphs would not write here"
        self.logits_NPV = torch.full((requests + 1, places, vocabulary), float("nan"), device=device)
        """The last request is padding's."""
        self.modes: list[dict[int, str]] = [{} for _ in range(requests)]
        """By request and place, what kind of step chose."""
        self._owner_T = torch.full((slots,), requests, dtype=torch.int64, device=device)
        self._owners = [requests] * slots
        self._begun = 0
        self._state, self._host = runner._state, runner.host
        self._greedy, self._choose = runner.choice.greedy, runner.choice.choose
        self._begin_slot, self._host_sample, self._launch = runner._state.begin, runner.host._sample, runner.launch
        runner._state.begin = self._begin  # type: ignore[method-assign]
        runner.host._sample = self._sample_on_host  # type: ignore[method-assign]
        runner.launch = self._launched  # type: ignore[method-assign]
        runner.choice.greedy = self._greedy_logged  # type: ignore[method-assign]
        runner.choice.choose = self._choose_logged  # type: ignore[method-assign]
        self._runner = runner

    def start(self) -> None:
        """What comes now is logged, as request 0 and up."""
        self._begun = 0
        self.logits_NPV.fill_(float("nan"))

    def _greedy_logged(self, columns_MC: torch.Tensor, slots_M: torch.Tensor) -> Samples:
        self._write(columns_MC, slots_M, self._state.lengths_T[slots_M])
        return self._greedy(columns_MC, slots_M)

    def _choose_logged(
        self, columns_MC: torch.Tensor, slots_M: torch.Tensor, positions_M: torch.Tensor, mode: SamplingMode
    ) -> Samples:
        self._write(columns_MC, slots_M, positions_M)
        return self._choose(columns_MC, slots_M, positions_M, mode)

    def _write(self, columns_MC: torch.Tensor, slots_M: torch.Tensor, positions_M: torch.Tensor) -> None:
        self.logits_NPV[self._owner_T[slots_M], positions_M] = self._runner.model.whole(columns_MC)

    def _begin(self, slot: int, setting: SlotSampling, has_rules: bool) -> None:
        self._owners[slot] = min(self._begun, len(self.modes))
        self._owner_T[slot : slot + 1].fill_(self._owners[slot])
        self._begun += 1
        self._begin_slot(slot, setting, has_rules)

    def _launched(self, plan: Any) -> Any:
        fallbacks, before = self._runner.fallbacks.total(), list(self._runner._slots.lengths)
        pending = self._launch(plan)
        where = "host" if self._runner.fallbacks.total() > fallbacks else "device"
        sampled = [chunk.slot for chunk in plan.chunks if chunk.sample] + plan.decodes
        mode = self._runner._slots.mode(sampled) if sampled else None
        chunks = [len(chunk.tokens) for chunk in plan.chunks]
        for chunk in plan.chunks:
            if chunk.sample:
                place = chunk.start + len(chunk.tokens)
                self._note(chunk.slot, place, f"{where}, chunks {chunks} beside {plan.decodes}, {mode}")
        for slot in plan.decodes:
            self._note(slot, before[slot] + 1, f"{where}, decodes {plan.decodes} beside chunks {chunks}, {mode}")
        return pending

    def _note(self, slot: int, place: int, what: str) -> None:
        if self._owners[slot] < len(self.modes):
            self.modes[self._owners[slot]][place] = what

    def _sample_on_host(self, logits_MV: torch.Tensor, slots: list[int], guesses: Any) -> Any:
        for row, slot in enumerate(slots):
            self.logits_NPV[self._owners[slot], self._host._lengths[slot]] = logits_MV[row].to(self.logits_NPV)
        return self._host_sample(logits_MV, slots, guesses)


class Answered:
    """Tokens of every request, and the logits that each was chosen from."""

    def __init__(self, prompts: list[list[int]], tokens: list[list[int]], log: LogitLog) -> None:
        self.prompts, self.tokens, self.modes = prompts, tokens, log.modes
        self.logits_NPV = log.logits_NPV.cpu()

    def differences(self, other: Answered) -> list[str]:
        """A line for each request: where its tokens and logits part from those of `other`, logits up to the first
        other token, and in which steps."""
        return [self._difference(other, request) for request in range(len(self.prompts))]

    def _difference(self, other: Answered, request: int) -> str:
        mine, theirs = self.tokens[request], other.tokens[request]
        first = len(self.prompts[request])
        same = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
        apart_PV = self.logits_NPV[request] - other.logits_NPV[request]
        apart = apart_PV[first : first + min(same + 1, len(mine))].abs().amax(-1).nan_to_num(float("inf")).tolist()
        worst = apart.index(max(apart))
        line = f"request {request} (prompt {first}): tokens {'equal' if mine == theirs else f'part at {same}'}; logits "
        line += f"differ by {apart[0]:.2e} at the first token, at most by {apart[worst]:.2e} at token {worst}"
        if mine != theirs:
            line += f"\n   here  {mine}\n   there {theirs}"
        far = next((place for place, distance in enumerate(apart) if distance > 1e-3), None)
        if far is not None:
            line += f"\n   beyond 1e-3 from token {far} on; here {self.modes[request].get(first + far)}"
            line += f"; there {other.modes[request].get(first + far)}"
        return line

    def farthest(self, other: Answered) -> float:
        """The largest difference of two logits before the first other token; infinite where tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        apart_NPV = (self.logits_NPV - other.logits_NPV)[:-1].abs()
        written = ~(self.logits_NPV.isnan() & other.logits_NPV.isnan())[:-1]
        return float(apart_NPV[written].nan_to_num(float("inf")).max())
