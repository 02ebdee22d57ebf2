"""Kernels of two ranks that meet in every step, for tests of waits and their deadlines."""

from __future__ import annotations

import time
from typing import Any

import torch
from plugin_zoo import TorchKernel, zoo_case, zoo_spec

from lowlat_plugin import Binding, DeadlineExceeded, StepInputs, ThreadRanks
from lowlat_plugin.conformance import Case, ReferenceHost


class Mailbox:
    """Two ranks that hand each other a number, with a deadline and a poison that reaches latecomers."""

    def __init__(self, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = 0, 2, deadline_s
        self.arrived: dict[int, int] = {}
        self.dead: set[int] = set()

    def handle(self, name: str) -> Any:
        return self

    def meet(self, rank: int, tag: int) -> None:
        if tag in self.dead:
            self.dead.discard(tag)
            raise DeadlineExceeded(f"rank {rank} came to step {tag} after its peers had given up")
        self.arrived[tag] = self.arrived.get(tag, 0) + 1
        until = time.monotonic() + self.deadline_s
        while self.arrived[tag] < self.size:
            if time.monotonic() > until:
                self.dead.add(tag)
                raise DeadlineExceeded(f"rank {rank} waited {self.deadline_s:g} s for its peer in step {tag}")
            time.sleep(0.002)


class MeetingKernel(TorchKernel):
    """Every step waits for the other rank. Both hold all weights, so results are those of one rank."""

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self.mailbox = binding.communicator.handle("mailbox")
        self.rank = binding.communicator.rank
        self.tag = 0

    def forward(self, step: StepInputs) -> torch.Tensor:
        self.tag += 1
        self.mailbox.meet(self.rank, self.tag)
        return super().forward(step)


def meeting_case(seed: int = 0) -> Case:
    """The zoo's case for two ranks, as `KernelSpec.example` names it."""
    case = zoo_case(seed, deadline_s=5.0)
    case.spec = zoo_spec(
        "MeetingKernel",
        implementation="plugin_meeting:MeetingKernel",
        example="plugin_meeting:meeting_case",
        min_deadline_s=0.1,
    )
    case.group = lambda size: meeting_hosts(case, size)
    return case


class RankHandle:
    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank, self.size, self.mailbox = rank, 2, mailbox

    def handle(self, name: str) -> Any:
        return self.mailbox


class MeetingHost(ReferenceHost):
    communicator: RankHandle | None = None

    def binding(self) -> Binding:
        found = super().binding()
        found.communicator = self.communicator
        return found


def meeting_hosts(case: Case, size: int) -> list[MeetingHost]:
    ranks, mailbox = ThreadRanks(size), Mailbox(case.deadline_s)
    hosts = [MeetingHost(case, ranks.of(rank)) for rank in range(size)]
    for rank, host in enumerate(hosts):
        host.communicator = RankHandle(rank, mailbox)
    return hosts
