"""A draft's network for few rows on a host, where the number of operators is what takes the time: projections of the
same rows are one product, and norms and rotations of several heads one operator.

Legend of shape suffixes as in `draft_network`; L layers, Y heads of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F

from lowlat.layers.rope import rotate
from lowlat.speculative.draft_network import Attend, DraftLayer, DraftNetwork

Product = Callable[[torch.Tensor], torch.Tensor]


class _Layer(msgspec.Struct):
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    input_norm_H: torch.Tensor
    mlp_norm_H: torch.Tensor
    norms_YD: torch.Tensor
    """Of query and key heads."""


class PackedNetwork:
    """The same function as the network that it is made of, of kinds whose layers do not mix rows (not DFlash 2)."""

    def __init__(self, network: DraftNetwork, pack: Callable[[torch.Tensor], Product]) -> None:
        """`pack`: from a matrix to products with it; the first one, of features, stays as it is (`int8_linear`)."""
        self._network, self._config = network, network.config
        config = self._config
        layers = [layer for layer in network.layers if isinstance(layer, DraftLayer)]
        assert all(layer.attention_mixing is None for layer in layers)
        keys, values = ([getattr(layer, name).weight for layer in layers] for name in ("k_proj", "v_proj"))
        self._keys_values = pack(torch.cat([*keys, *values]))
        self._key_norms_L1D = torch.stack([layer.k_norm.weight for layer in layers])[:, None]
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._layers = [
            _Layer(
                pack(layer.qkv_weight()),
                pack(layer.o_proj.weight),
                pack(layer.gate_up_weight()),
                pack(layer.down_proj.weight),
                layer.input_layernorm.weight,
                layer.post_attention_layernorm.weight,
                torch.cat([layer.q_norm.weight.expand(heads, dim), layer.k_norm.weight.expand(kv_heads, dim)]),
            )
            for layer in layers
        ]

    def context(self, features_RX: torch.Tensor, positions_R: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As `DraftNetwork.context`."""
        config, network = self._config, self._network
        u_RH = network.hidden_norm(network.fc(features_RX))
        shape = (len(positions_R), 2, len(self._layers), config.num_key_value_heads, config.head_dim)
        keys_RLKD, values_RLKD = self._keys_values(u_RH).view(shape).unbind(1)
        cos_R1D, sin_R1D = network.rotation(positions_R, u_RH.dtype)
        keys_RLKD = rotate(self._normed(keys_RLKD) * self._key_norms_L1D, cos_R1D[:, None], sin_R1D[:, None])
        return list(zip(keys_RLKD.unbind(1), values_RLKD.unbind(1), strict=True))

    def block(self, x_QBH: torch.Tensor, positions_QB: torch.Tensor, attend: Attend) -> torch.Tensor:
        """As `DraftNetwork.block`."""
        config, rows = self._config, x_QBH.shape[:2]
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rotation = self._network.rotation(positions_QB.flatten(), x_QBH.dtype)
        x_RH = x_QBH.flatten(0, 1)
        for index, layer in enumerate(self._layers):
            y_RYD = layer.qkv(self._rms(x_RH, layer.input_norm_H)).view(len(x_RH), -1, dim)
            looks_RYD = self._normed(y_RYD[:, : heads + kv_heads]) * layer.norms_YD
            looks_QBYD = rotate(looks_RYD, *rotation).view(*rows, -1, dim)
            v_QBKD = y_RYD[:, heads + kv_heads :].view(*rows, kv_heads, dim)
            mixed_QBND = attend(index, looks_QBYD[:, :, :heads], looks_QBYD[:, :, heads:], v_QBKD)
            x_RH = x_RH + layer.output(mixed_QBND.reshape(len(x_RH), -1))
            gate_RI, up_RI = layer.gate_up(self._rms(x_RH, layer.mlp_norm_H)).chunk(2, 1)
            x_RH = x_RH + layer.down(F.silu(gate_RI) * up_RI)
        return x_RH.view(x_QBH.shape)

    def _rms(self, x_RH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_RH, weight_H.shape, weight_H, self._config.rms_norm_eps)

    def _normed(self, x_RYD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_RYD, x_RYD.shape[-1:], None, self._config.rms_norm_eps)
