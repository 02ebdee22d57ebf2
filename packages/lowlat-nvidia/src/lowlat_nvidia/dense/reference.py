"""The same step in plain PyTorch and float32, from the same bfloat16 weights: what the kernel is compared with.

Suffixes: T tokens, H KV heads, G query heads a KV head, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowlat_nvidia.dense.pack import DenseWeights, LayerWeights
from lowlat_nvidia.dense.plan import DenseShape
from lowlat_nvidia.dense.rows import StepRow, rows_of
from lowlat_nvidia.dense.step import StepTensors


def random_weights(shape: DenseShape, seed: int, device: str) -> DenseWeights:
    """Weights with unit gain in every projection, norms near one, biases of the size of what they are added to."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * scale + mean).to(torch.bfloat16)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return draw(outputs, inputs, scale=inputs**-0.5)

    def norm(size: int) -> Tensor:
        return draw(size, scale=0.1, mean=1.0)

    def bias(size: int) -> Tensor | None:
        return draw(size) if shape.qkv_bias else None

    kv = shape.kv_heads * shape.head_dim
    layers = [
        LayerWeights(
            q=matrix(shape.qdim, shape.hidden),
            k=matrix(kv, shape.hidden),
            v=matrix(kv, shape.hidden),
            o=matrix(shape.hidden, shape.qdim),
            gate=matrix(shape.inter, shape.hidden),
            up=matrix(shape.inter, shape.hidden),
            down=matrix(shape.hidden, shape.inter),
            norm1=norm(shape.hidden),
            norm2=norm(shape.hidden),
            q_norm=norm(shape.head_dim) if shape.qk_norm else None,
            k_norm=norm(shape.head_dim) if shape.qk_norm else None,
            q_bias=bias(shape.qdim),
            k_bias=bias(kv),
            v_bias=bias(kv),
        )
        for _ in range(shape.layers)
    ]
    embedding = draw(shape.vocab, shape.hidden)
    return DenseWeights(embedding, embedding, norm(shape.hidden), layers)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates halves of the last dimension; `table` [2, D / 2] is one position's cosine and sine."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * table[0] - b * table[1], b * table[0] + a * table[1]], -1)


def project(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    y = matrix.to(x.dtype) @ x
    return y if bias is None else y + bias.to(x.dtype)


def reference_row(
    shape: DenseShape,
    weights: DenseWeights,
    rotary: Tensor,
    pools: list[tuple[Tensor, Tensor]],
    page_size: int,
    row: StepRow,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logits [V] of one row, all arithmetic in `dtype`.

    Rows must be taken in order: each writes its keys and values into the pools.
    """
    slots = row.slots(page_size)
    x = weights.embedding[row.token].to(dtype)
    table = rotary[row.position].to(dtype)
    group, dim = shape.q_heads // shape.kv_heads, shape.head_dim
    for layer, (pool_k, pool_v) in zip(weights.layers, pools, strict=True):
        y = rms_norm(x, layer.norm1, shape.eps)
        q_HGD = project(layer.q, y, layer.q_bias).view(shape.kv_heads, group, dim)
        k_HD = project(layer.k, y, layer.k_bias).view(shape.kv_heads, dim)
        v_HD = project(layer.v, y, layer.v_bias).view(shape.kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_HGD = rms_norm(q_HGD, layer.q_norm, shape.eps)
            k_HD = rms_norm(k_HD, layer.k_norm, shape.eps)
        pool_k[slots[-1]] = rotate(k_HD, table).to(pool_k.dtype)
        pool_v[slots[-1]] = v_HD.to(pool_v.dtype)
        q_HGD = rotate(q_HGD, table)
        keys_THD, values_THD = pool_k[slots].to(dtype), pool_v[slots].to(dtype)
        weight_HGT = torch.softmax(torch.einsum("hgd,thd->hgt", q_HGD, keys_THD) * dim**-0.5, -1)
        x = x + layer.o.to(dtype) @ torch.einsum("hgt,thd->hgd", weight_HGT, values_THD).reshape(-1)
        y = rms_norm(x, layer.norm2, shape.eps)
        x = x + layer.down.to(dtype) @ (torch.nn.functional.silu(layer.gate.to(dtype) @ y) * (layer.up.to(dtype) @ y))
    return weights.lm_head.to(dtype) @ rms_norm(x, weights.norm, shape.eps)


def reference_step(
    shape: DenseShape,
    weights: DenseWeights,
    rotary: Tensor,
    pools: list[tuple[Tensor, Tensor]],
    page_size: int,
    step: StepTensors,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logits [R, V], all arithmetic in `dtype`; writes every real row's keys and values. Padding rows: as `rows_of`."""
    rows = rows_of(step)
    if not rows[0].real:
        pools = [(k[:1].clone(), v[:1].clone()) for k, v in pools]
    found = {
        index: reference_row(shape, weights, rotary, pools, page_size, row, dtype)
        for index, row in enumerate(rows)
        if row.source == index
    }
    return torch.stack([found[row.source] for row in rows])
