"""Reads weights of the published names, only what a rank holds, one at a time.

Legend of shape suffixes: N output features, K input features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lowlat.layers.deepseek_moe import Expert
from lowlat.layers.deepseek_numerics import Fp4Weight, Fp8Weight, Numerics, PlainWeight, Weight
from lowlat.layers.hyper_connections import MixWeights
from lowlat.models.base import LoadProgress
from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.config import DeepseekConfig

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

_PREFIX = "model."


class Weights:
    """One rank's view of a checkpoint. All methods raise `CheckpointError` for a missing or damaged weight."""

    def __init__(
        self, checkpoint: Checkpoint, config: DeepseekConfig, numerics: Numerics, progress: LoadProgress | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.numerics = numerics
        self._progress = progress
        self._prefix = _PREFIX if f"{_PREFIX}embed.weight" in checkpoint else ""
        self._total = checkpoint.weight_bytes()
        self._done = 0

    def raw(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """A tensor as stored, or a part of it."""
        tensor = self.checkpoint.tensor(self._prefix + name, None, rows=rows, columns=columns)
        self._done += tensor.numel() * tensor.element_size()
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        return tensor

    def stored_name(self, name: str) -> str:
        """The name in the files."""
        return self._prefix + name

    def values(self, name: str, *, rows: slice | None = None) -> torch.Tensor:
        """A plain weight in the compute type."""
        return self.raw(name, rows=rows).to(self.numerics.compute)

    def plain(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> PlainWeight:
        """A bfloat16 or float32 matrix."""
        return PlainWeight(self.raw(f"{name}.weight", rows=rows, columns=columns))

    def fp8(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """An FP8 matrix with its blocks' scales; `rows` and `columns` need not lie on blocks' edges.

        Raises:
            UnsupportedModelError: columns that split a group of quantised activations.
        """
        codes = self.raw(f"{name}.weight", rows=rows, columns=columns)
        if codes.dtype.itemsize > 1:
            return PlainWeight(codes)
        block = self.config.weight_block
        group = self.numerics.group
        if self.numerics.quantised and columns and (columns.start % group or codes.shape[1] % group):
            raise UnsupportedModelError(
                f"{name}: inputs {columns.start} to {columns.stop} split groups of {group} quantised activations; "
                "use fewer ranks or the unquantised mode"
            )
        parts = [_covering(part, block) for part in (rows, columns)]
        scales = self.raw(f"{name}.scale", rows=parts[0], columns=parts[1])
        offset = tuple(part.start % block if part else 0 for part in (rows, columns))
        return Fp8Weight(_bytes(codes), _bytes(scales), block, (offset[0], offset[1]))

    def fp4(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Weight:
        """An FP4 matrix; `columns` (inputs) must be multiples of 32."""
        packed_columns = scale_columns = None
        if columns is not None:
            packed_columns = slice(columns.start // 2, columns.stop // 2)
            scale_columns = slice(columns.start // 32, columns.stop // 32)
        packed = self.raw(f"{name}.weight", rows=rows, columns=packed_columns)
        scales = self.raw(f"{name}.scale", rows=rows, columns=scale_columns)
        return Fp4Weight(_bytes(packed), _bytes(scales))

    def expert(self, name: str, inner: slice, *, routed: bool) -> Expert:
        """w1, w3 (rows `inner`) and w2 (columns `inner`) of one expert."""
        read = self.fp4 if routed and self.config.expert_dtype == "fp4" else self.fp8
        return Expert(
            gate=read(f"{name}.w1", rows=inner),
            up=read(f"{name}.w3", rows=inner),
            down=read(f"{name}.w2", columns=inner),
        )

    def mix(self, name: str) -> MixWeights:
        """One hyper-connection's `fn`, `base` and `scale`."""
        return MixWeights(*(self.values(f"{name}_{part}") for part in ("fn", "base", "scale")))


def _covering(part: slice | None, block: int) -> slice | None:
    """The blocks that a part touches."""
    return None if part is None else slice(part.start // block, -(-part.stop // block))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
