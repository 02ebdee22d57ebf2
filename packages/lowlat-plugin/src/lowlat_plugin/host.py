"""What an engine supplies so that kernels can be installed in it. This is the whole of the host's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lowlat_plugin.agreement import Agreement
from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.kernel import BuildContext, Workspace
from lowlat_plugin.spec import KernelSpec
from lowlat_plugin.steps import Binding, StepInputs, StepOutputs

if TYPE_CHECKING:
    from torch import Tensor


class Host(Protocol):
    """An engine as kernels see it.

    `context` is called after the weights are loaded, `binding` after the pools exist, and again whenever they moved.
    `general` runs the model's own forward for any mode, prefill included, on the bound pools, and gives logits of every
    row; with `forced` it takes the named selections as given (feature `shadow.forced`). `scratch_pages` are pages that
    nobody owns, which the shadow check may overwrite. `memory_bytes` is the device memory taken by this process, None
    where it cannot be told. `synchronize` waits until the device has nothing left to do.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def agreement(self) -> Agreement: ...

    @property
    def device(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def context(self, spec: KernelSpec, workspace: Workspace) -> BuildContext: ...

    def binding(self) -> Binding: ...

    def general(self, step: StepInputs, forced: Mapping[str, Tensor] | None = None) -> StepOutputs: ...

    def scratch_pages(self) -> Sequence[int]: ...

    def memory_bytes(self) -> int | None: ...

    def synchronize(self) -> None: ...
