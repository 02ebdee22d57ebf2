"""Bytes that a decode step must read at least once, from shapes alone; time follows from the measured read ceiling.

Counted: every weight once (embedding rows only for the step's tokens), and keys and values of each request's context.
Not counted: activations, which stay on chip, and what is written.
"""

from __future__ import annotations

import msgspec

from lowlat.bench.presets import DenseShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StepBytes(msgspec.Struct, frozen=True):
    """Bytes of one step by what they are, on one rank."""

    layers: int
    head: int
    kv: int
    embedding: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.head + self.kv + self.embedding + self.draft

    def floor_us(self, read_ceiling_tb_s: float) -> float:
        """Microseconds to read them at the given ceiling."""
        return self.total / (read_ceiling_tb_s * 1e6)


def dense_step_bytes(
    shape: DenseShape, *, requests: int, context: int, dtype: str, tp: int = 1, width: int = 1
) -> StepBytes:
    """Bytes of a decode step of a dense model: `requests` requests of `context` cached tokens, `width` rows each.

    Under tensor parallelism `tp` projections and cache are split evenly and norms are on every rank. Raises ValueError
    for an unknown dtype and a `tp` that does not divide the KV heads.
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if shape.kv_heads % tp or shape.heads % tp:
        raise ValueError(f"{tp} ranks do not share {shape.kv_heads} KV heads of {shape.name} evenly")
    size = DTYPE_BYTES[dtype]
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.hidden * (query + 2 * key_value) + query * shape.hidden + 3 * shape.hidden * shape.intermediate
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    layers = shape.layers * (projections // tp + norms) + shape.hidden
    kv = 2 * shape.layers * (key_value // tp) * context * requests
    return StepBytes(
        layers=layers * size,
        head=shape.vocab * shape.hidden // tp * size,
        kv=kv * size,
        embedding=requests * width * shape.hidden * size,
    )


class _V41:
    """Shapes of DeepSeek-V4.1-Flash that bytes depend on, and bytes an element of its weight formats."""

    hidden, layers, heads, head_dim, query_rank = 5120, 40, 64, 512, 1280
    output_groups, output_rank, vocab = 8, 1024, 129280
    experts, experts_per_row, expert_width = 384, 6, 2304
    draft_layers, draft_rows, draft_experts, draft_experts_per_row, markov_rank = 3, 5, 128, 3, 256
    window, selected, index_heads, index_dim = 128, 512, 32, 128
    ratio = (0, 0) + (2,) * 18 + (1,) * 20
    kv_sources, index_sources, engram_layers = (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), (1, 14)
    candidates, engram_out, engram_in = 16384, 25600, 6144
    window_entry, main_entry, index_entry = 528, 288, 68
    fp8 = 1 + 1 / 1024
    fp4 = 0.5 + 1 / 32


def expected_distinct(rows: int, choices: int, chosen: int) -> float:
    """Expected number of different experts where `rows` rows choose `chosen` of `choices` each, uniformly."""
    return choices * (1 - (1 - chosen / choices) ** rows)


def _v41_attention(tp: int) -> float:
    m = _V41
    replicated = m.query_rank * m.hidden + m.head_dim * m.hidden
    split = (
        m.heads * m.head_dim * m.query_rank
        + m.output_rank * m.heads * m.head_dim
        + m.hidden * m.output_groups * m.output_rank
    )
    return (replicated + split / tp) * m.fp8


def _v41_experts(tp: int, rows: int, experts: int, chosen: int) -> float:
    m = _V41
    expert = 3 * m.hidden * m.expert_width
    routed = expected_distinct(rows, experts, chosen) * expert * m.fp4
    return (routed + expert * m.fp8) / tp + experts * m.hidden * 2


def _v41_layer_kv(layer: int, rows: int, context: int) -> float:
    """Cache bytes of one layer where the rows select different entries (the worst case)."""
    m = _V41
    read: float = (m.window + rows - 1) * m.window_entry
    if not m.ratio[layer]:
        return read
    entries = context // m.ratio[layer]
    read += min(rows * min(m.selected, entries), entries) * m.main_entry
    if layer in m.index_sources:
        scanned = entries if layer in m.kv_sources else min(rows * min(entries, m.candidates), entries)
        read += scanned * m.index_entry
    return read


def v41_step_bytes(*, rows: int, context: int, tp: int, layers: int | None = None, draft: bool = True) -> StepBytes:
    """Bytes a rank reads in one verify and draft step of DeepSeek-V4.1-Flash (FP8, experts and cache FP4), one request.

    The number of different experts is the expectation under uniform routing. `layers` keeps the first so many layers.
    """
    m = _V41
    count = m.layers if layers is None else layers
    if not 1 <= count <= m.layers:
        raise ValueError(f"deepseek-v41 has {m.layers} layers, not {layers}")
    connections = 2 * 24 * 4 * m.hidden * 4
    shared = _v41_attention(tp) + connections
    weights = kv = 0.0
    for layer in range(count):
        weights += shared + _v41_experts(tp, rows, m.experts, m.experts_per_row)
        if layer in m.index_sources:
            weights += m.index_heads * m.index_dim * m.query_rank * m.fp8 + m.index_heads * m.hidden * 2
        if layer in m.kv_sources:
            doubled = 2 if m.ratio[layer] == 2 else 1
            weights += m.head_dim * m.hidden * 2 * doubled + m.index_dim * m.head_dim * 2
        if layer in m.engram_layers:
            weights += m.engram_out * m.engram_in * m.fp8
        kv += _v41_layer_kv(layer, rows, context)
    head = m.vocab * m.hidden * 2 / tp
    drafted = 0.0
    if draft:
        experts = _v41_experts(tp, m.draft_rows, m.draft_experts, m.draft_experts_per_row)
        window = (m.window + m.draft_rows) * m.window_entry
        drafted = m.draft_layers * (shared + experts + window)
        drafted += m.hidden * 3 * m.hidden * m.fp8 + 3 * m.head_dim * m.hidden * m.fp8
        drafted += head + m.vocab * m.markov_rank * 2 / tp
    return StepBytes(layers=round(weights), head=round(head), kv=round(kv), draft=round(drafted))
