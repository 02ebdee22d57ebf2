"""A decoder's forward for steps whose state lives on the device: fused operations, no read by the host.

The layers, their weights and the order of operations are those of `decoder`; only what lies between the products is
computed by `DeviceOps`. It may be captured in a graph where every MLP is a plain gated one.

Legend of shape suffixes: see `device_step`; V vocabulary, M sampled rows.
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
        x_RH = self.states(step, kv)
        return self.logits(x_RH if step.sample_rows is None else x_RH.index_select(0, step.sample_rows))

    def states(self, step: DeviceStep, kv: KVPool) -> torch.Tensor:
        """Last states [R, H] of all rows, behind the last norm; keys and values are written to `kv`."""
        decoder, ops, eps = self.decoder, self.ops, self.decoder.config.rms_norm_eps
        residual_RH = decoder.embed(step.tokens_R)
        norms = [layer.input_norm_H for layer in decoder.layers[1:]] + [decoder.norm_H]
        x_RH = ops.norm(residual_RH, decoder.layers[0].input_norm_H, eps)
        for layer, keys_SKD, values_SKD, norm_H in zip(decoder.layers, kv.keys, kv.values, norms, strict=True):
            x_RH = self._layer(layer, x_RH, residual_RH, keys_SKD, values_SKD, step, norm_H)
        return x_RH

    def logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] in float32 of last states."""
        decoder = self.decoder
        logits_MV = decoder.gather_columns(decoder.head(x_MH)).float()
        return logits_MV if decoder.logit_cap is None else torch.tanh(logits_MV / decoder.logit_cap) * decoder.logit_cap

    def _layer(
        self,
        layer: DecoderLayer,
        x_RH: torch.Tensor,
        residual_RH: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
        norm_H: torch.Tensor,
    ) -> torch.Tensor:
        """`x_RH` is normed for this layer, and what is returned for the next, whose norm is `norm_H`."""
        ops, eps = self.ops, self.decoder.config.rms_norm_eps
        seen = step.windowed if layer.window and step.windowed is not None else step
        x_RH = self._attention(layer, x_RH, keys_SKD, values_SKD, seen)
        if layer.attention_out_norm_H is not None:
            x_RH = ops.norm(x_RH, layer.attention_out_norm_H, eps)
        x_RH = self._mlp(layer, ops.add_norm(x_RH, residual_RH, layer.mlp_norm_H, eps))
        if layer.mlp_out_norm_H is not None:
            x_RH = ops.norm(x_RH, layer.mlp_out_norm_H, eps)
        return ops.add_norm(x_RH, residual_RH, norm_H, eps)

    def _attention(
        self,
        layer: DecoderLayer,
        x_RH: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        step: DeviceStep,
    ) -> torch.Tensor:
        qkv_RYD = layer.qkv(x_RH).view(len(x_RH), -1, layer.head_dim)
        norms = None
        if layer.head_norm_XD is not None:
            norms = (layer.head_norm_XD[0], layer.head_norm_XD[layer.query_heads], layer.eps)
        tables = self.decoder.ropes[layer.window].tables
        q_RND = self.ops.rope_write(qkv_RYD, keys_SKD, values_SKD, step, tables, norms)
        mixed = self.ops.attend(q_RND, keys_SKD, values_SKD, step, layer.rule)
        return layer.all_reduce(layer.output(mixed))

    def _mlp(self, layer: DecoderLayer, x_RH: torch.Tensor) -> torch.Tensor:
        mlp = layer.mlp
        name = _NAMES.get(mlp.activation) if isinstance(mlp, GatedMLP) else None
        if name is None:
            return mlp(x_RH, len(x_RH))
        assert isinstance(mlp, GatedMLP)
        return mlp.all_reduce(mlp.down(self.ops.gate(mlp.gate_up(x_RH), name)))
