"""The interface of a platform."""

from __future__ import annotations

from typing import Protocol

import torch


class PackedLinear(Protocol):
    """A weight in the form that a platform multiplies fastest: [rows, in] -> [rows, out]."""

    def __call__(self, x_RI: torch.Tensor) -> torch.Tensor:
        """Multiply, and add the bias where there is one."""


class Platform(Protocol):
    """One kind of device: what the engine and the layers ask of it."""

    name: str
    device: torch.device
    default_dtype: str
    page_size: int
    """Default tokens a page."""
    min_rows: int
    """Steps with fewer rows are padded to this many, where the device computes more rows faster than fewer."""

    keeps_state: bool
    """Whether the state of slots lives on the device between steps, so that the host need not wait for it."""

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
        """Prepare a weight [out, in] for multiplication; it may be copied, so drop the original afterwards."""

    def memory_available(self) -> int:
        """Bytes that the KV pool may plan with."""

    def set_threads(self, threads: int) -> None:
        """Use so many CPU threads for operators called from the current thread."""
