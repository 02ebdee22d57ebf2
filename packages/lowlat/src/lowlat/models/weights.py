"""Weights as a model's constructor reads them: in its type, on its device, with progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowlat.models.base import BuildContext, LoadProgress

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


class Weights:
    """Reads weights in the model's type and reports how far it is."""

    def __init__(self, checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> None:
        self._checkpoint = checkpoint
        self._dtype = build.dtype
        self._device = build.platform.device
        self._progress = progress
        self._total = checkpoint.weight_bytes()
        self._done = 0

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """One weight, or a rank's part of it. Raises `CheckpointError` when it is missing."""
        return self._read(name, self._dtype, rows, columns)

    def norm(self, name: str, offset: float) -> torch.Tensor:
        """A norm's weight plus what its family adds to it, in the model's type; added before rounding."""
        return (self.stored(name).float() + offset).to(self._dtype)

    def stored(self, name: str, *, rows: slice | None = None) -> torch.Tensor:
        """One weight in the type of the file: quantised blocks, or numbers that are to be combined before rounding."""
        return self._read(name, None, rows, None)

    def _read(self, name: str, dtype: torch.dtype | None, rows: slice | None, columns: slice | None) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name, dtype, rows=rows, columns=columns).to(self._device)
        self._done += tensor.numel() * tensor.element_size()
        self._progress(min(self._done, self._total), self._total)
        return tensor
