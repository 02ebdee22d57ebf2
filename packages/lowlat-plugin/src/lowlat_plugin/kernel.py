"""What a kernel library implements: one class, five methods that matter, the rest optional.

config_reasons -> observe_weight* -> model_reasons -> probe -> build -> bind -> forward* -> refresh | suspend | close
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.reasons import Code, Reason, Refused
from lowlat_plugin.spec import KernelSpec, Mode, Numerics
from lowlat_plugin.steps import Binding, KVLayout, Part, Selection, Shape, StepInputs

if TYPE_CHECKING:
    from torch import Tensor


class Plan(msgspec.Struct, frozen=True):
    """What `probe` promises: the shapes covered and the device memory that `build` will take, in bytes."""

    shapes: frozenset[Shape]
    workspace_bytes: int = 0
    notes: str = ""

    def identity(self) -> list[object]:
        """What must be equal on all ranks, and whenever the question is asked again."""
        return [sorted(map(str, self.shapes)), self.workspace_bytes]


def decode_shapes(widths: Iterable[int]) -> frozenset[Shape]:
    """Shapes of plain decode: as many rows as requests."""
    return frozenset(Shape(Mode.DECODE, width, width) for width in widths)


def verify_shapes(widths: Iterable[int], tokens_per_request: int) -> frozenset[Shape]:
    """Shapes of verification with the same number of rows for every request."""
    return frozenset(
        Shape(Mode.VERIFY, width // tokens_per_request, width) for width in widths if width % tokens_per_request == 0
    )


class WeightSource(Protocol):
    """The loaded model's tensors, by the names that the checkpoint's family uses in Hugging Face files.

    With several ranks `BuildContext.weights_whole` says whether they are whole or this rank's part of each.
    """

    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> Tensor: ...


class Workspace:
    """Where kernels take device memory. It closes when the build ends, so that memory taken late is an error by name.

    A host sizes its KV pools after the build; what is taken here is subtracted, what is taken later would not be.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.taken_bytes = 0
        self._open = True

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """A new tensor, not initialised, on the step's device.

        Raises Refused (code `late-memory`) once the build is over.
        """
        import torch

        if not self._open:
            wanted = "all memory taken in build()"
            raise Refused("kernels", [Reason(Code.LATE_MEMORY, "workspace", f"empty{shape} after build", wanted)])
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.taken_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        self._open = False


@dataclass(slots=True)
class BuildContext:
    """All that `probe` and `build` may look at. `layout.slots` is 0: pools are sized after the build.

    Steps never hold more than `max_requests` requests. `tokens_per_request` is how many rows a request has in a verify
    step of this model (1 without speculation), and `deadline_s` the longest that a wait for another rank may take.
    After every layer in `taps`, in rising order, the states of a step's rows are wanted (capability
    `hidden-states.taps`): `Kernel.state` gives them as `features`, [R, taps * hidden size], side by side.
    """

    facts: EngineFacts
    limits_widths: frozenset[int]
    layout: KVLayout
    device: str
    rank: int
    world_size: int
    deadline_s: float
    weights: WeightSource
    workspace: Workspace
    checkpoint: Path | None = None
    max_requests: int = 8
    tokens_per_request: int = 1
    taps: tuple[int, ...] = ()
    weights_whole: bool = True
    model: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.facts.config


class Kernel:
    """Base class of an implementation. The constructor must not touch a device."""

    table_rows = False
    """Whether steps may bring `StepInputs.table_rows_Q`; for others the host gathers the tables of the requests."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def config_reasons(self, facts: EngineFacts) -> Iterable[Reason]:
        """Refusals that the spec cannot express, before weights are read."""
        return ()

    def observe_weight(self, name: str, tensor: Tensor) -> None:
        """See a checkpoint's tensor as it is stored, before the model transforms it."""

    def model_reasons(self, context: BuildContext) -> Iterable[Reason]:
        """Refusals that need the loaded model."""
        return ()

    def probe(self, context: BuildContext) -> Plan:
        """Say what will be covered. Takes no device memory and gives the same answer whenever asked."""
        raise NotImplementedError

    def build(self, context: BuildContext) -> None:
        """Compile, pack weights and take all memory, from `context.workspace`."""
        raise NotImplementedError

    def bind(self, binding: Binding) -> None:
        """Keep the addresses of pools, step buffers and communicators. Called again whenever they move."""
        raise NotImplementedError

    def forward(self, step: StepInputs) -> Tensor:
        """Compute one step: write each row's keys and values, return logits [R, V] float32.

        No host synchronisation where the device has a queue; capturable where the host captures graphs. A wait for
        another rank that passes the deadline raises `DeadlineExceeded` on every rank.
        """
        raise NotImplementedError

    def numerics(self) -> Numerics:
        """What the shadow check holds the built kernels to: the spec's bounds, or others that follow from the model."""
        return self.spec.numerics

    def greedy(self) -> Tensor | None:
        """Each row's greedy token in the last `forward`, int64 [R] or longer, where kernels choose it themselves.

        Of equal logits it is the lowest token, and -1 where the greatest is no finite number. Read in the same graph.
        None: the host takes it from the logits.
        """
        return None

    def fault(self) -> Exception | None:
        """What went wrong on the device in a step whose `forward` had returned; may wait for the device.

        Such a step leaves NaN among every row's logits, and -1 as greedy token: hosts that find these ask here.
        """
        return None

    def parts(self, step: StepInputs) -> Sequence[Part]:
        """Compute one step as `forward` does, with time stamps inside, and say when its parts ran. Optional.

        For measurements (`lowlat bench regions`): it may take memory and compile at its first call, and waits for the
        device. A refusal to measure is an empty sequence.
        """
        return ()

    def selections(self) -> Mapping[str, Selection]:
        """The discrete choices of the last `forward`, for the shadow check. The greedy token is taken from logits."""
        return {}

    def state(self) -> Mapping[str, Tensor]:
        """Named outputs of the last `forward` beside logits and KV: `features` for the host, others for the shadow
        check."""
        return {}

    def refresh(self, context: BuildContext) -> None:
        """Take over updated weights. A library that does not override this is disabled by a weight update."""
        raise NotImplementedError

    def suspend(self) -> None:
        """Give device memory back, keep what is needed to resume."""
        raise NotImplementedError

    def resume(self, context: BuildContext) -> None:
        """Undo `suspend`; `bind` follows."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back. Called once, also after a failed build."""

    def summary(self) -> str:
        """One line for the log."""
        return self.spec.description or self.spec.name


def offers(kernel: Kernel, method: str) -> bool:
    """Whether an implementation overrides an optional method of `Kernel`."""
    return getattr(type(kernel), method, None) is not getattr(Kernel, method)
