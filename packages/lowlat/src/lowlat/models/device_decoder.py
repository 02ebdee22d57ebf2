"""A decoder's forward for steps whose state lives on the device: fused operations, no read by the host.

The layers, their weights and the order of operations are those of `decoder`; only what lies between the products is
computed by `DeviceOps`. It may be captured in a graph where no layer asks the host which experts were chosen.

Legend of shape suffixes: see `device_step`; V vocabulary, C this rank's columns of it,
M sampled rows, X = Y * D columns of queries, keys, values, T tapped layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lowlat.cache.layout import KVPool
from lowlat.layers.activation import GATED
from lowlat.layers.device_step import DeviceOps, DeviceStep
from lowlat.layers.moe import MixtureOfExperts
from lowlat.layers.row_sums import RowSums
from lowlat.models.decoder import Decoder, DecoderLayer, GatedMLP
from lowlat.platform.base import PackedLinear

_NAMES = {function: name for name, function in GATED.items()}


class Added(NamedTuple):
    """Rows that are still to be added to the residual stream."""

    x_RH: torch.Tensor
    summed: bool
    """False: this rank's part, which is to be summed over the ranks first."""

    def of(self, rows_M: torch.Tensor) -> Added:
        """Those of some rows."""
        return Added(self.x_RH.index_select(0, rows_M), self.summed)


class DeviceDecoder:
    """Runs a `Decoder` on `DeviceStep`s."""

    def __init__(self, decoder: Decoder, ops: DeviceOps, sums: RowSums | None = None) -> None:
        """`sums`: how the ranks of a group join their parts; None: there is one rank."""
        self.decoder = decoder
        self.ops = ops
        self.sums = sums
        self.vocab_size = decoder.config.vocab_size
        self.taps: tuple[tuple[int, ...], Callable[[torch.Tensor, DeviceStep], object]] | None = None
        """Layers after which states are wanted, in their order, and who gets them side by side with the step; without
        layers it gets no columns."""
        self._left_out: frozenset[int] = frozenset()

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Inside, forwards run no more than two layers of a kind: all kernels, and none of them for a result."""
        kinds: Counter[object] = Counter()
        left_out = set()
        for index, layer in enumerate(self.decoder.layers):
            kind = layer.window, type(layer.mlp), layer.rule.window, layer.rule.sinks_N is None
            kinds[kind] += 1
            if kinds[kind] > 2:
                left_out.add(index)
        self._left_out = frozenset(left_out)
        try:
            yield
        finally:
            self._left_out = frozenset()

    def capturable(self, rows: int) -> bool:
        """Whether no layer asks the host anything in steps of up to so many rows: experts may, to compute only those
        that were chosen."""
        return all(self._asks_nothing(layer.mlp, rows) for layer in self.decoder.layers)

    def _asks_nothing(self, mlp: object, rows: int) -> bool:
        if isinstance(mlp, MixtureOfExperts):
            return self.ops.finds_experts(mlp.experts, rows)
        return isinstance(mlp, GatedMLP)

    def forward(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """Logits [M, V] in float32; keys and values of the rows are written to `kv`."""
        return self.whole(self.columns(step, kv))

    def columns(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """What this rank brings to `whole`, [M, C]; keys and values are written to `kv`."""
        added, residual_RH = self._layers(step, kv)
        if step.sample_rows is not None:
            added, residual_RH = added.of(step.sample_rows), residual_RH.index_select(0, step.sample_rows)
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        columns_MC, _ = self._product(added, residual_RH, decoder.norm_H, eps, decoder.head, out_dtype=torch.float32)
        return columns_MC

    def states(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """Last states [R, H] of all rows, behind the last norm; keys and values are written to `kv`."""
        added, residual_RH = self._layers(step, kv)
        return self._add_norm(added, residual_RH, self.decoder.norm_H, self.decoder.config.rms_norm_eps)

    def head(self, x_MH: torch.Tensor) -> torch.Tensor:
        """What this rank brings to `whole` for last states, [M, C]; of several by the kernel that decode steps have."""
        return self.ops.product(x_MH, self.decoder.head, out_dtype=torch.float32)

    def logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] in float32 of last states."""
        return self.whole(self.head(x_MH))

    def whole(self, columns_MC: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of the ranks' columns."""
        return self.capped(self.decoder.gather_columns(columns_MC))

    def capped(self, logits_MC: torch.Tensor) -> torch.Tensor:
        """Logits of some columns, capped where the family does."""
        cap = self.decoder.logit_cap
        return logits_MC if cap is None else torch.tanh(logits_MC / cap) * cap

    def embed(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """As `Decoder.embed`."""
        x_RH = self.ops.look_up(tokens_R, self.decoder.embedding_VH)
        scale = self.decoder.embedding_scale
        return x_RH if scale == 1.0 else x_RH * scale

    def _layers(self, step: DeviceStep, kv: KVPool) -> tuple[Added, torch.Tensor]:
        """What the last layer adds to the residual stream, and the stream before it, each [R, H]."""
        residual_RH, added = self.embed(step.tokens_R), None
        tapped = self.taps[0] if self.taps is not None else ()
        features_RTH = residual_RH.new_empty(len(residual_RH), len(tapped), residual_RH.shape[1])
        parts = zip(self.decoder.layers, kv.keys, kv.values, strict=True)
        for index, (layer, keys_SKD, values_SKD) in enumerate(parts):
            if index in self._left_out:
                continue
            added, residual_RH = self._layer(layer, added, residual_RH, keys_SKD, values_SKD, step)
            if index in tapped:
                assert self.sums is None, "ranks would have to be summed first"
                self.ops.add(residual_RH, added.x_RH, features_RTH[:, tapped.index(index)])
        if self.taps is not None:
            self.taps[1](features_RTH.flatten(1), step)
        assert added is not None
        return added, residual_RH

    def _layer(
        self,
        layer: DecoderLayer,
        added: Added | None,
        residual_RH: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> tuple[Added, torch.Tensor]:
        """What is still to be added to the residual stream behind this layer, and the stream."""
        seen = step.windowed if layer.window and step.windowed is not None else step
        qkv_RX, residual_RH = self._product(added, residual_RH, layer.input_norm_H, layer.eps, layer.qkv)
        x_RH = self._attention(layer, qkv_RX, keys_SKD, values_SKD, seen)
        added = self._normed(Added(x_RH, self.sums is None), layer.attention_out_norm_H, layer.eps)
        added, residual_RH = self._mlp(layer, added, residual_RH)
        return self._normed(added, layer.mlp_out_norm_H, layer.eps), residual_RH

    def _attention(
        self,
        layer: DecoderLayer,
        qkv_RX: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        qkv_RYD = qkv_RX.view(len(qkv_RX), -1, layer.head_dim)
        mixed = self.mixed(layer, qkv_RYD, keys_SKD, values_SKD, step)
        return self.ops.product(mixed, layer.output)

    def mixed(
        self,
        layer: DecoderLayer,
        qkv_RYD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        """What a layer's attention mixes for rows of its packed projection, [R, N * D]."""
        norms = None
        if layer.head_norm_XD is not None:
            norms = (layer.head_norm_XD[0], layer.head_norm_XD[layer.query_heads], layer.eps)
        tables = self.decoder.ropes[layer.window].tables
        return self.ops.rope_attend(qkv_RYD, keys_SKD, values_SKD, step, tables, norms, layer.rule)

    def _mlp(self, layer: DecoderLayer, added: Added, residual_RH: torch.Tensor) -> tuple[Added, torch.Tensor]:
        """What the MLP adds to the residual stream, and the stream before it."""
        mlp = layer.mlp
        if isinstance(mlp, MixtureOfExperts):
            x_RH = self._add_norm(added, residual_RH, layer.mlp_norm_H, layer.eps)
            return Added(self.ops.experts(x_RH, *mlp.router(x_RH), mlp.experts), self.sums is None), residual_RH
        name = _NAMES.get(mlp.activation) if isinstance(mlp, GatedMLP) else None
        if name is None:
            x_RH = self._add_norm(added, residual_RH, layer.mlp_norm_H, layer.eps)
            return Added(mlp(x_RH, len(x_RH)), True), residual_RH
        assert isinstance(mlp, GatedMLP)
        active_RI, residual_RH = self._product(added, residual_RH, layer.mlp_norm_H, layer.eps, mlp.gate_up, name)
        return Added(self.ops.product(active_RI, mlp.down), self.sums is None), residual_RH

    # --- what stands between products, where ranks join their parts ---------------------------------------------------

    def _product(
        self,
        added: Added | None,
        residual_RH: torch.Tensor,
        norm_H: torch.Tensor,
        eps: float,
        linear: PackedLinear,
        activation: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DeviceOps.add_norm_product`."""
        if added is None or added.summed:
            x_RH = None if added is None else added.x_RH
            return self.ops.add_norm_product(x_RH, residual_RH, norm_H, eps, linear, activation, out_dtype)
        normed_RH = self._add_norm(added, residual_RH, norm_H, eps)
        return self.ops.product(normed_RH, linear, activation, out_dtype), residual_RH

    def _add_norm(self, added: Added, residual_RH: torch.Tensor, norm_H: torch.Tensor, eps: float) -> torch.Tensor:
        """As `DeviceOps.add_norm`."""
        if added.summed:
            return self.ops.add_norm(added.x_RH, residual_RH, norm_H, eps)
        assert self.sums is not None
        return self.sums.reduce_add_norm(added.x_RH, residual_RH, norm_H, eps)

    def _normed(self, added: Added, norm_H: torch.Tensor | None, eps: float) -> Added:
        """Behind a norm of its own, where the family has one."""
        if norm_H is None:
            return added
        x_RH = added.x_RH
        if not added.summed:
            assert self.sums is not None
            x_RH = self.sums.reduce(x_RH)
        return Added(self.ops.norm(x_RH, norm_H, eps), True)
