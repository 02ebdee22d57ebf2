"""A dense decoder's decode step as an ordinary user of PyTorch writes it, plain or compiled layer by layer.

    python benchmarks/plain_decoder.py MODEL REQUESTS CONTEXT [DTYPE [DEVICE]]

compiles the layer of one case and leaves the code in PyTorch's cache: many cases side by side take no longer than one,
and whoever compiles the same case later finds it there.

Legend of shape suffixes: B requests (one row each), H hidden, N query heads, K KV heads, D head dimension, L tokens.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from lowlat.bench.presets import DenseShape, find_shape
from lowlat.models.decoder import DecoderLayer, GatedMLP


class PlainDecoder:
    """The decoder as an ordinary user of PyTorch writes it, on the engine's weights and in its cache's memory."""

    def __init__(self, decoder: Any, kv: Any, shape: DenseShape, batch: int, context: int, *, compiled: bool) -> None:
        """`decoder`: a `Decoder`; `kv`: its `KVPool`."""
        self.shape, self.decoder = shape, decoder
        device, dtype = decoder.embedding_VH.device, decoder.embedding_VH.dtype
        self.tokens_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.position = torch.tensor([context - 1], device=device)
        cos_PD, sin_PD = decoder.ropes[0].tables
        self.cos_D, self.sin_D = cos_PD[context - 1].to(dtype), sin_PD[context - 1].to(dtype)

        def cache(tensor_SKD: torch.Tensor) -> torch.Tensor:
            return tensor_SKD[: batch * context].view(batch, context, *tensor_SKD.shape[1:]).transpose(1, 2)

        self.caches = [(cache(k), cache(v)) for k, v in zip(kv.keys, kv.values, strict=True)]
        self.layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._layer
        if compiled:
            torch._dynamo.config.recompile_limit = 256
            self.layer = torch.compile(self._layer, fullgraph=True, dynamic=False)

    def __call__(self) -> torch.Tensor:
        """Greedy next tokens [B]."""
        x_BH = F.embedding(self.tokens_B, self.decoder.embedding_VH)
        delta_BH = torch.zeros_like(x_BH)
        for layer, (keys, values) in zip(self.decoder.layers, self.caches, strict=True):
            x_BH, delta_BH = self.layer(x_BH, delta_BH, _weights(layer), keys, values)
        x_BH = F.rms_norm(x_BH + delta_BH, (self.shape.hidden,), self.decoder.norm_H, self.shape.eps)
        return self.decoder.head(x_BH).argmax(-1)

    def _layer(
        self,
        x_BH: torch.Tensor,
        delta_BH: torch.Tensor,
        weights: list[torch.Tensor],
        keys_BKLD: torch.Tensor,
        values_BKLD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        qkv, out, gate_up, down, norm1, norm2, *head_norms = weights
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        x_BH = x_BH + delta_BH
        h_BH = F.rms_norm(x_BH, (shape.hidden,), norm1, shape.eps)
        q, k, v = F.linear(h_BH, qkv).split([query, key_value, key_value], -1)
        q_BND = q.view(-1, shape.heads, shape.head_dim)
        k_BKD, v_BKD = (part.view(-1, shape.kv_heads, shape.head_dim) for part in (k, v))
        if head_norms:
            q_BND = F.rms_norm(q_BND, (shape.head_dim,), head_norms[0], shape.eps)
            k_BKD = F.rms_norm(k_BKD, (shape.head_dim,), head_norms[1], shape.eps)
        keys_BKLD.index_copy_(2, self.position, self._rotate(k_BKD).unsqueeze(2))
        values_BKLD.index_copy_(2, self.position, v_BKD.unsqueeze(2))
        mixed = F.scaled_dot_product_attention(
            self._rotate(q_BND).unsqueeze(2), keys_BKLD, values_BKLD, enable_gqa=True
        )
        x_BH = x_BH + F.linear(mixed.reshape(-1, query), out)
        gate, up = F.linear(F.rms_norm(x_BH, (shape.hidden,), norm2, shape.eps), gate_up).chunk(2, -1)
        return x_BH, F.linear(F.silu(gate) * up, down)

    def _rotate(self, x_BXD: torch.Tensor) -> torch.Tensor:
        half = self.shape.head_dim // 2
        # The table's sine has its first half negative already.
        return x_BXD * self.cos_D + torch.cat((x_BXD[..., half:], x_BXD[..., :half]), -1) * self.sin_D


def _weights(layer: DecoderLayer) -> list[torch.Tensor]:
    mlp: Any = layer.mlp
    assert isinstance(mlp, GatedMLP)
    weights = [_plain(packed) for packed in (layer.qkv, layer.output, mlp.gate_up, mlp.down)]
    weights += [layer.input_norm_H, layer.mlp_norm_H]
    if layer.head_norm_XD is not None:
        weights += [layer.head_norm_XD[0], layer.head_norm_XD[layer.query_heads]]
    return weights


def _plain(packed: Any) -> torch.Tensor:
    """A platform's weight as a tensor [out, in]; what a CPU packs is unpacked by multiplying the identity."""
    weight_OI = getattr(packed, "weight_OI", None)
    if weight_OI is None:
        weight_OI = packed._weight_OI
    if weight_OI is not None:
        return weight_OI
    if not hasattr(packed, "_unpacked"):
        size = packed._packed.shape[1]
        packed._unpacked = packed(torch.eye(size, dtype=packed._packed.dtype)).T.contiguous()
    return packed._unpacked


def compile_alone(shape: DenseShape, batch: int, context: int, dtype: torch.dtype, device: str) -> None:
    """Compile the layer of one case on tensors of its own."""

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device).to(dtype)

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    table_PD = torch.ones(context, shape.head_dim, device=device)
    decoder = SimpleNamespace(embedding_VH=drawn(1, shape.hidden), ropes=[SimpleNamespace(tables=(table_PD, table_PD))])
    pools = [[drawn(batch * context, shape.kv_heads, shape.head_dim)] for _ in range(2)]
    weights = [drawn(query + 2 * key_value, shape.hidden), drawn(shape.hidden, query)]
    weights += [drawn(2 * shape.intermediate, shape.hidden), drawn(shape.hidden, shape.intermediate)]
    weights += [drawn(shape.hidden), drawn(shape.hidden)]
    weights += [drawn(shape.head_dim), drawn(shape.head_dim)] if shape.qk_norm else []
    step = PlainDecoder(decoder, SimpleNamespace(keys=pools[0], values=pools[1]), shape, batch, context, compiled=True)
    with torch.inference_mode():
        x_BH = drawn(batch, shape.hidden)
        step.layer(x_BH, torch.zeros_like(x_BH), weights, *step.caches[0])


def compile_side_by_side(cases: list[tuple[str, int, int]], dtype: str, device: str) -> list[subprocess.Popen[bytes]]:
    """Start a process for every (model, requests, context)."""
    return [
        subprocess.Popen([sys.executable, __file__, model, str(batch), str(context), dtype, device])
        for model, batch, context in cases
    ]


def main() -> None:
    """One case."""
    model, batch, context, dtype, device = [*sys.argv[1:], "bfloat16", "cuda"][:5]
    # The other cases' processes have the other processors.
    torch._inductor.config.compile_threads = 1
    compile_alone(find_shape(model), int(batch), int(context), getattr(torch, dtype), device)
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    print(f"{model}, {batch} requests, context {context}: {'found' if hits else 'compiled'}", flush=True)


if __name__ == "__main__":
    main()
