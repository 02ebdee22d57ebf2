"""The worked example's kernels, each with one promise broken, for tests on a real model."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch

from lowlat_cpu.kernel import LlamaKernel
from lowlat_cpu.specs import LLAMA
from lowlat_plugin import (
    Binding,
    BuildContext,
    Condition,
    DeviceLimits,
    KernelSpec,
    Plan,
    StepInputs,
    VersionRange,
    decode_shapes,
)


def spec_of(kernel: str, widths: tuple[int, ...] = (1, 2), **changes: Any) -> KernelSpec:
    return msgspec.structs.replace(
        LLAMA,
        name=kernel.lower(),
        implementation=f"broken_cpu_kernels:{kernel}",
        devices={"*": DeviceLimits(frozenset(widths))},
        min_deadline_s=0.1,
        **changes,
    )


class Works(LlamaKernel):
    pass


class ProbeRaises(LlamaKernel):
    def probe(self, context: BuildContext) -> Plan:
        raise OSError("peer access was refused")


class BuildRaises(LlamaKernel):
    def build(self, context: BuildContext) -> None:
        raise MemoryError("cannot take 3 GB")


class OutOfBounds(LlamaKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        return super().forward(step) * (1.02 if step.shape.rows == 2 else 1)


class WrongSlot(LlamaKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        step.write_slots_R = step.write_slots_R + 1
        return super().forward(step)


class WaitsForEver(LlamaKernel):
    over = threading.Event()
    """Set when the tests end: the thread that was given up ends too."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        self.over.wait()
        raise RuntimeError("nobody waits for this any more")


class TakesMemoryLate(LlamaKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        self.late = torch.ones(16 << 20)
        return super().forward(step)


class ChangesPlan(LlamaKernel):
    asked = 0

    def probe(self, context: BuildContext) -> Plan:
        self.asked += 1
        plan = super().probe(context)
        return plan if self.asked == 1 else Plan(decode_shapes([1]), plan.workspace_bytes)


class IgnoresRebind(LlamaKernel):
    bound = False

    def bind(self, binding: Binding) -> None:
        if not self.bound:
            super().bind(binding)
        self.bound = True


class FailsLater(LlamaKernel):
    """Well at start, throws at the third step of serving."""

    served = -1

    def forward(self, step: StepInputs) -> torch.Tensor:
        if self.served >= 0:
            self.served += 1
            if self.served > 3:
                raise RuntimeError("an illegal address was met")
        return super().forward(step)


CASES: list[tuple[KernelSpec, str]] = [
    (spec_of("NoSuchClass"), "load-failed"),
    (msgspec.structs.replace(spec_of("Works"), implementation="no_such_module:Kernel"), "load-failed"),
    (spec_of("Works", contract=VersionRange(7, 9)), "contract-version"),
    (msgspec.structs.replace(spec_of("Works"), devices={"sm_90": DeviceLimits(frozenset({1}))}), "isa"),
    (
        spec_of(
            "Works", requires=msgspec.structs.replace(LLAMA.requires, config={"hidden_size": Condition(one_of=(4096,))})
        ),
        "config-field",
    ),
    (spec_of("ProbeRaises"), "raised"),
    (spec_of("BuildRaises"), "raised"),
    (spec_of("OutOfBounds"), "numerics"),
    (spec_of("WrongSlot"), "kv-write"),
    (spec_of("WaitsForEver"), "deadline"),
    (spec_of("TakesMemoryLate"), "late-memory"),
    (spec_of("ChangesPlan"), "plan-changed"),
    (spec_of("IgnoresRebind"), "numerics"),
]
