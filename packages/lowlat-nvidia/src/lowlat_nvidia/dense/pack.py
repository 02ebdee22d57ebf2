"""Weights in the order in which the kernel reads them.

A fragment is the operand of a matrix instruction, 16 bytes a lane: 16 outputs x 16 inputs, of which lane 4 g + q has
outputs g and g + 8. Two of them make 32 inputs, of which the lane has 8 q to 8 q + 7, four in each. The 8 outputs that
may be left of a block lie in fragments of 8 x 32. A page is a few fragments; page i of all blocks and warps lie
together, so that the chip reads one compact region at a time.

Suffixes: N outputs, K inputs, P pages, E elements of one page of all warps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.dense.plan import BLOCKS, WARPS, DensePlan, DenseShape, chunk_fragments


@dataclass(slots=True)
class LayerWeights:
    """One layer, bfloat16. Projections are [outputs, inputs] as checkpoints store them; norms and biases vectors."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm1: Tensor
    norm2: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None


@dataclass(slots=True)
class DenseWeights:
    """A whole model. `lm_head` may be the same tensor as `embedding`."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor
    layers: list[LayerWeights]


def pack_matrix(w_NK: Tensor, page_fragments: int) -> Tensor:
    """[N, K] with rows in the order of blocks -> [P, E], as each warp of each block reads it."""
    outputs, inputs = w_NK.shape
    chunks, chunk, rows = inputs // 256 // chunk_fragments(inputs), chunk_fragments(inputs), outputs // BLOCKS
    blocks = w_NK.reshape(BLOCKS, rows, inputs)
    width = BLOCKS * WARPS * page_fragments * 256
    parts = []
    if rows >= 16:
        # block, tile, half of its outputs, output g, warp, chunk, 32 inputs, q, fragment, half of its inputs, pair
        view = blocks[:, : rows // 16 * 16].reshape(BLOCKS, rows // 16, 2, 8, WARPS, chunks, chunk, 4, 2, 2, 2)
        wide = view.permute(5, 1, 6, 8, 0, 4, 3, 7, 9, 2, 10)
        wide = wide.reshape(chunks, -1, page_fragments, BLOCKS * WARPS, 256).transpose(2, 3)
        parts.append(wide.reshape(chunks, -1, width))
    if rows % 16:
        # block, output g, warp, chunk, 32 inputs, q, half of the operand's rows, half of its inputs, pair
        view = blocks[:, rows // 16 * 16 :].reshape(BLOCKS, 8, WARPS, chunks, chunk, 4, 2, 2, 2)
        narrow = view.permute(3, 4, 0, 2, 1, 5, 7, 6, 8)
        narrow = narrow.reshape(chunks, -1, page_fragments, BLOCKS * WARPS, 256).transpose(2, 3)
        parts.append(narrow.reshape(chunks, -1, width))
    return torch.cat(parts, 1).reshape(-1, width)


def unpack_matrix(pages_PE: Tensor, outputs: int, inputs: int, page_fragments: int) -> Tensor:
    """The inverse of `pack_matrix`."""
    chunks, chunk, rows = inputs // 256 // chunk_fragments(inputs), chunk_fragments(inputs), outputs // BLOCKS
    pages = pages_PE.reshape(chunks, -1, BLOCKS * WARPS, page_fragments, 256).transpose(2, 3)
    tiles = rows // 16
    count = tiles * 2 * chunk // page_fragments
    wide = pages[:, :count].reshape(chunks, tiles, chunk, 2, BLOCKS, WARPS, 8, 4, 2, 2, 2)
    parts = [wide.permute(4, 1, 9, 6, 5, 0, 2, 7, 3, 8, 10).reshape(BLOCKS, tiles * 16, inputs)]
    if rows % 16:
        narrow = pages[:, count:].reshape(chunks, chunk, BLOCKS, WARPS, 8, 4, 2, 2, 2)
        parts.append(narrow.permute(2, 4, 3, 0, 1, 5, 7, 6, 8).reshape(BLOCKS, 8, inputs))
    return torch.cat(parts, 1).reshape(outputs, inputs)


def order_qkv(shape: DenseShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows (of matrices, or entries of biases) by KV head: its queries, its key, its value."""
    parts = [w.reshape(shape.kv_heads, -1, *w.shape[1:]) for w in (q, k, v)]
    return torch.cat(parts, 1).reshape(-1, *q.shape[1:])


def order_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up rows in alternation, so that one lane holds both of an activation."""
    return torch.stack([gate, up], 1).reshape(-1, gate.shape[1])


def order_logits(shape: DenseShape, lm_head: Tensor) -> Tensor:
    """Padded with zero rows to whole tiles for every block."""
    rows = BLOCKS * shape.lm_tiles * 8
    return torch.nn.functional.pad(lm_head, (0, 0, 0, rows - shape.vocab))


def stages(shape: DenseShape, weights: DenseWeights) -> Iterable[Tensor]:
    """All matrices in the order of use, rows ordered."""
    for layer in weights.layers:
        yield order_qkv(shape, layer.q, layer.k, layer.v)
        yield layer.o
        yield order_gate_up(layer.gate, layer.up)
        yield layer.down
    yield order_logits(shape, weights.lm_head)


def pack(plan: DensePlan, weights: DenseWeights, out_PE: Tensor) -> None:
    """Fills the stream [stream_pages, E], bfloat16."""
    at = 0
    for matrix in stages(plan.shape, weights):
        pages = pack_matrix(matrix, plan.page_fragments)
        out_PE[at : at + len(pages)].copy_(pages)
        at += len(pages)
    if at != plan.stream_pages():
        raise AssertionError(f"packed {at} pages, the plan has {plan.stream_pages()}")


def pack_norms(weights: DenseWeights) -> Tensor:
    """[2 * layers + 1, hidden]: both norms of every layer, then the last."""
    rows = [norm for layer in weights.layers for norm in (layer.norm1, layer.norm2)]
    return torch.stack([*rows, weights.norm]).contiguous()


def pack_head_norms(shape: DenseShape, weights: DenseWeights) -> Tensor:
    """[layers, 2, head_dim] of query and key; ones where the model has none."""
    rows = []
    for layer in weights.layers:
        for norm in (layer.q_norm, layer.k_norm):
            rows.append(weights.norm.new_ones(shape.head_dim) if norm is None else norm)
    return torch.stack(rows).reshape(shape.layers, 2, shape.head_dim).contiguous()


def pack_biases(shape: DenseShape, weights: DenseWeights) -> Tensor:
    """[layers, kv_heads * head_rows] in the order of the projected elements; zeros where the model has none."""
    rows = []
    for layer in weights.layers:
        if layer.q_bias is None or layer.k_bias is None or layer.v_bias is None:
            rows.append(weights.norm.new_zeros(shape.kv_heads * shape.head_rows))
        else:
            rows.append(order_qkv(shape, layer.q_bias, layer.k_bias, layer.v_bias))
    return torch.stack(rows).contiguous()
