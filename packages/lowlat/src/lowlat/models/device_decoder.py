"""A decoder's forward for steps whose state lives on the device: fused operations, no read by the host.

The layers, their weights and the order of operations are those of `decoder`; only what lies between the products is
computed by `DeviceOps`. It may be captured in a graph where every MLP is a plain gated one.

Legend of shape suffixes: see `device_step`; V vocabulary, M sampled rows, X = Y * D columns of queries, keys, values.
"""

from __future__ import annotations

import torch

from lowlat.cache.layout import KVPool
from lowlat.layers.activation import GATED
from lowlat.layers.device_step import DeviceOps, DeviceStep
from lowlat.models.decoder import Decoder, DecoderLayer, GatedMLP

_NAMES = {function: name for name, function in GATED.items()}


class DeviceDecoder:
    """Runs a `Decoder` on `DeviceStep`s."""

    def __init__(self, decoder: Decoder, ops: DeviceOps) -> None:
        self.decoder = decoder
        self.ops = ops
        self.vocab_size = decoder.config.vocab_size

    @property
    def capturable(self) -> bool:
        """Whether no layer asks the host anything: experts do, to compute only those that were chosen."""
        return all(isinstance(layer.mlp, GatedMLP) for layer in self.decoder.layers)

    def forward(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """Logits [M, V] in float32; keys and values of the rows are written to `kv`."""
        x_RH, residual_RH = self._layers(step, kv)
        if step.sample_rows is not None:
            x_RH, residual_RH = (rows.index_select(0, step.sample_rows) for rows in (x_RH, residual_RH))
        decoder = self.decoder
        logits_MV, _ = self.ops.add_norm_product(
            x_RH, residual_RH, decoder.norm_H, decoder.config.rms_norm_eps, decoder.head, out_dtype=torch.float32
        )
        return self._whole(logits_MV)

    def states(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """Last states [R, H] of all rows, behind the last norm; keys and values are written to `kv`."""
        decoder = self.decoder
        return self.ops.add_norm(*self._layers(step, kv), decoder.norm_H, decoder.config.rms_norm_eps)

    def logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] in float32 of last states."""
        return self._whole(self.ops.product(x_MH, self.decoder.head).float())

    def _whole(self, logits_MC: torch.Tensor) -> torch.Tensor:
        """Join the ranks' columns, and cap where the family does."""
        logits_MV, cap = self.decoder.gather_columns(logits_MC), self.decoder.logit_cap
        return logits_MV if cap is None else torch.tanh(logits_MV / cap) * cap

    def _layers(self, step: DeviceStep, kv: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last layer adds to the residual stream, and the stream before it, each [R, H]."""
        residual_RH, x_RH = self.decoder.embed(step.tokens_R), None
        for layer, keys_SKD, values_SKD in zip(self.decoder.layers, kv.keys, kv.values, strict=True):
            x_RH, residual_RH = self._layer(layer, x_RH, residual_RH, keys_SKD, values_SKD, step)
        assert x_RH is not None
        return x_RH, residual_RH

    def _layer(
        self,
        layer: DecoderLayer,
        x_RH: torch.Tensor | None,
        residual_RH: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x_RH` is still to be added to the residual stream, and so is what is returned, beside the stream."""
        ops, eps = self.ops, layer.eps
        seen = step.windowed if layer.window and step.windowed is not None else step
        qkv_RX, residual_RH = ops.add_norm_product(x_RH, residual_RH, layer.input_norm_H, eps, layer.qkv)
        x_RH = self._attention(layer, qkv_RX, keys_SKD, values_SKD, seen)
        if layer.attention_out_norm_H is not None:
            x_RH = ops.norm(x_RH, layer.attention_out_norm_H, eps)
        x_RH, residual_RH = self._mlp(layer, x_RH, residual_RH)
        return (x_RH if layer.mlp_out_norm_H is None else ops.norm(x_RH, layer.mlp_out_norm_H, eps)), residual_RH

    def _attention(
        self,
        layer: DecoderLayer,
        qkv_RX: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        qkv_RYD = qkv_RX.view(len(qkv_RX), -1, layer.head_dim)
        norms = None
        if layer.head_norm_XD is not None:
            norms = (layer.head_norm_XD[0], layer.head_norm_XD[layer.query_heads], layer.eps)
        tables = self.decoder.ropes[layer.window].tables
        q_RND = self.ops.rope_write(qkv_RYD, keys_SKD, values_SKD, step, tables, norms)
        mixed = self.ops.attend(q_RND, keys_SKD, values_SKD, step, layer.rule)
        return layer.all_reduce(self.ops.product(mixed, layer.output))

    def _mlp(
        self, layer: DecoderLayer, x_RH: torch.Tensor, residual_RH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the MLP adds to the residual stream, and the stream before it."""
        mlp, ops = layer.mlp, self.ops
        name = _NAMES.get(mlp.activation) if isinstance(mlp, GatedMLP) else None
        if name is None:
            return mlp(ops.add_norm(x_RH, residual_RH, layer.mlp_norm_H, layer.eps), len(x_RH)), residual_RH
        assert isinstance(mlp, GatedMLP)
        active_RI, residual_RH = ops.add_norm_product(x_RH, residual_RH, layer.mlp_norm_H, layer.eps, mlp.gate_up, name)
        return mlp.all_reduce(ops.product(active_RI, mlp.down)), residual_RH
