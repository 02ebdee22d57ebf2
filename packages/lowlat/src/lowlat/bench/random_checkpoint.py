"""A checkpoint without files: weights of a shape, drawn when they are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowlat.bench.presets import DenseShape
from lowlat.models.loading.checkpoint import Source


def weight_names(shape: DenseShape) -> Iterator[str]:
    """Names of all weights of a dense decoder, in the order in which they are computed with."""
    yield "model.embed_tokens.weight"
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if shape.qk_norm else []
    for layer in range(shape.layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in parts)
    yield "model.norm.weight"
    if not shape.tied:
        yield "lm_head.weight"


def weight_shape(shape: DenseShape, name: str) -> tuple[int, ...]:
    """Shape of a weight by its checkpoint name. Raises KeyError for a name that a dense decoder does not have."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    known = {
        "q_proj": (query, shape.hidden),
        "k_proj": (key_value, shape.hidden),
        "v_proj": (key_value, shape.hidden),
        "o_proj": (shape.hidden, query),
        "gate_proj": (shape.intermediate, shape.hidden),
        "up_proj": (shape.intermediate, shape.hidden),
        "down_proj": (shape.hidden, shape.intermediate),
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "norm": (shape.hidden,),
        "embed_tokens": (shape.vocab, shape.hidden),
        "lm_head": (shape.vocab, shape.hidden),
    }
    return known[name.removesuffix(".weight").rpartition(".")[2]]


class RandomCheckpoint:
    """Stands for a checkpoint of a shape: every weight is drawn when it is read, the same for the same seed."""

    def __init__(self, shape: DenseShape, seed: int, device: str = "cpu") -> None:
        """On a GPU weights are drawn there, 16 GB in a second instead of minutes; they differ from a CPU's."""
        self.name = f"{shape.name} with random weights"
        self.source = Source(Path(shape.name), "safetensors")
        self.config: dict[str, Any] = shape.config()
        self.generation_config: dict[str, Any] = {}
        self._shape = shape
        self._seed = seed
        self._device = device

    def names(self) -> list[str]:
        """Names of all weights, sorted."""
        return sorted(weight_names(self._shape))

    def __contains__(self, name: str) -> bool:
        return name in set(weight_names(self._shape))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight."""
        return weight_shape(self._shape, name)

    def weight_bytes(self) -> int:
        """Nothing is on disk."""
        return 0

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """A random weight (norms are ones), or the part of it that a rank needs."""
        size = weight_shape(self._shape, name)
        if len(size) == 1:
            return torch.ones(size, dtype=dtype, device=self._device)[rows or slice(None)]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # Drawn in one type and rounded, so that a kernel library that asks for another type gets the same weights.
        tensor = torch.randn(size, generator=generator, dtype=torch.float32, device=self._device).mul_(0.02)
        tensor = tensor.to(dtype or torch.float32)
        return tensor[rows or slice(None), columns or slice(None)].contiguous()
