"""A step as kernels see it: typed, model-neutral, and the same in every host.

Shape suffixes: R rows (query tokens), Q requests, P pages a request, V vocabulary, S token slots, H key/value heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lowlat_plugin.spec import Mode

if TYPE_CHECKING:
    from torch import Tensor


class Shape(msgspec.Struct, frozen=True, order=True):
    """What a route and a captured graph are keyed by, beside the layout: mode, requests, rows."""

    mode: Mode
    requests: int
    rows: int

    def __str__(self) -> str:
        return f"{self.mode.value}/{self.requests}x{self.rows}"


class KVLayout(msgspec.Struct, frozen=True):
    """Where an entry lies: element `d` of head `h` of slot `s` is at `base + s * slot_stride + h * head_stride + d`.

    Strides count elements. Position `p` of a request is in slot `page_table[p // page_size] * page_size + p %
    page_size`. The bases, one for K and one for V of each layer, are in the `Binding`. `slots` is 0 while pools are
    not sized yet.
    """

    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    slot_stride: int
    head_stride: int
    slots: int = 0

    def key(self) -> str:
        """What of the layout a route depends on, as text: everything but the number of slots."""
        return f"{self.dtype}.h{self.kv_heads}x{self.head_dim}.p{self.page_size}.s{self.slot_stride}.{self.head_stride}"


@dataclass(slots=True)
class LayerKV:
    """One layer's keys and values, each [S, H, D], as the host's general path reads them."""

    k_SHD: Tensor
    v_SHD: Tensor


@dataclass(slots=True)
class StepInputs:
    """One step. All tensors are on the device; nothing here may be read by the host inside `forward`.

    token_ids_R     int64  the token of each row
    positions_R     int64  its position in its request
    query_start_Q1  int32  request q owns rows query_start[q] to query_start[q + 1] - 1
    lengths_Q       int32  entries of request q after this step; 0 for a padding request
    page_table_QP   int32  page numbers of request q, in order
    write_slots_R   int64  where row r's key and value go; negative for a padding row, which writes nothing
    logits_RV       float32 or None: where to write; kernels that are given None allocate
    table_rows_Q    int32 or None: request q has row table_rows[q] of page_table instead of row q; given only to kernels
                    that set `Kernel.table_rows`

    Row r of request q at position p attends to positions 0 to p. Rows of one request are consecutive in position.
    Logits of every row are wanted; those of padding rows may hold anything.
    """

    mode: Mode
    token_ids_R: Tensor
    positions_R: Tensor
    query_start_Q1: Tensor
    lengths_Q: Tensor
    page_table_QP: Tensor
    write_slots_R: Tensor
    logits_RV: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    table_rows_Q: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.mode, int(self.lengths_Q.shape[0]), int(self.token_ids_R.shape[0]))


@dataclass(slots=True)
class Selection:
    """A discrete choice inside a step: for each row the chosen indices, and the scores that they were chosen by.

    `scores` is [R, candidates], larger is better; a host's general forward must give it, kernels need not.
    """

    indices: Tensor
    scores: Tensor | None = None


@dataclass(slots=True)
class StepOutputs:
    """Logits [R, V] float32, the selections made on the way, and named state written beside the KV."""

    logits_RV: Tensor
    selections: Mapping[str, Selection] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)


class Part(msgspec.Struct, frozen=True):
    """A part of one step in time, in microseconds from its beginning.

    Parts of depth 1 follow one another without gaps from the step's beginning to its end; those of depth d lie in parts
    of depth d - 1.
    """

    name: str
    start_us: float
    end_us: float
    depth: int = 1


class Communicator(Protocol):
    """What kernels of several ranks need from their host; `handle(name)` gives vendor objects by name, or None."""

    rank: int
    size: int

    def handle(self, name: str) -> Any: ...


@dataclass(slots=True)
class Binding:
    """Addresses that stay put until the next bind: pools, step buffers where the host captures graphs, communicators.

    `generation` grows with every re-allocation. `extras` holds model-specific pools by name (index keys, window rings).
    """

    generation: int
    layout: KVLayout
    layers: tuple[LayerKV, ...]
    communicator: Communicator | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def addresses(self) -> tuple[int, ...]:
        """The seal: every address that kernels may have kept."""
        found = [tensor.data_ptr() for layer in self.layers for tensor in (layer.k_SHD, layer.v_SHD)]
        found += [self.extras[name].data_ptr() for name in sorted(self.extras)]
        return tuple(found)
