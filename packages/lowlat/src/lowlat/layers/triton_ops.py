"""The operations of a decoder layer as Triton kernels. Importing this module imports triton.

Legend of shape suffixes: see `device_step`.
"""

from __future__ import annotations

import torch

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceStep
from lowlat.layers.triton.activation import gated
from lowlat.layers.triton.attention import attend
from lowlat.layers.triton.norm import add_rms_norm, rms_norm
from lowlat.layers.triton.rope_write import rope_write


class TritonOps:
    """`DeviceOps` on a device with `processors` multiprocessors."""

    def __init__(self, processors: int) -> None:
        self._programs = 2 * processors

    def norm(self, x_RH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm."""
        return rms_norm(x_RH, weight_H, eps)

    def add_norm(
        self, x_RH: torch.Tensor, residual_RH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add to the residual stream in place, and RMSNorm."""
        return add_rms_norm(x_RH, residual_RH, weight_H, eps)

    def gate(self, gate_up_RI: torch.Tensor, activation: str) -> torch.Tensor:
        """Gated activation."""
        return gated(gate_up_RI, activation)

    def rope_write(
        self,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        tables: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Norm, rotation, and the write of keys and values."""
        return rope_write(qkv_RYD, keys_SKD, values_SKD, step.positions_R, step.write_slots_R, tables, norms)

    def attend(
        self,
        q_RND: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Paged attention; the segments cover every row, so that all of the result is written."""
        out_RND = torch.empty_like(q_RND)
        where = (step.table_TP, step.page_size)
        for batch in step.segments:
            attend(q_RND, keys_SKD, values_SKD, *where, batch, rule, out_RND, programs=self._programs)
        return out_RND.flatten(1)
