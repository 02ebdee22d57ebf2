"""Where keys and values of a token lie: the one addressing that every kernel and host shares.

Legend of shape suffixes: S slots (one a token), K key-value heads, D head dimension.
"""

from __future__ import annotations

import msgspec
import torch


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Paged keys and values, K and V apart, each [slots, kv heads, head dim] a layer.

    Token `t` of a request lies in slot `page_table[t // page_size] * page_size + t % page_size`. Strides are in
    elements. One page beyond the pool's pages exists for padding rows: `padding_page`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str
    """`float32` or `bfloat16`."""
    window_layers: frozenset[int] = frozenset()
    """Layers with a window: their keys and values lie in pages of their own, found by a page table of their own."""
    window_pages: int = 0
    """Such pages; 0: these layers too use the pages of the others."""

    @property
    def slots(self) -> int:
        """Slots in each tensor of layers that see all tokens, the padding page included."""
        return (self.pages + 1) * self.page_size

    def pages_of(self, layer: int) -> int:
        """Pages of one layer."""
        return self.window_pages if self.window_pages and layer in self.window_layers else self.pages

    @property
    def padding_page(self) -> int:
        """Page that padding rows may write; no request ever reads it."""
        return self.pages

    @property
    def slot_stride(self) -> int:
        """Elements between the keys of neighbouring slots."""
        return self.kv_heads * self.head_dim

    @property
    def head_stride(self) -> int:
        """Elements between neighbouring heads of one slot."""
        return self.head_dim

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.slot_stride * torch_dtype(self.dtype).itemsize


class KVPool:
    """The tensors of one `KVLayout`: `keys[layer]` and `values[layer]`, each [S, K, D], S by the layer's pages."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        self.keys, self.values = ([self._empty(layer, device) for layer in range(layout.layers)] for _ in range(2))

    def _empty(self, layer: int, device: torch.device) -> torch.Tensor:
        # Not zeroed: on a CPU that would commit the whole pool, and no step reads a slot that none wrote.
        layout = self.layout
        written = layout.pages_of(layer) * layout.page_size
        shape = (written + layout.page_size, layout.kv_heads, layout.head_dim)
        tensor = torch.empty(shape, dtype=torch_dtype(layout.dtype), device=device)
        tensor[written:].zero_()
        return tensor

    def copy_state(self, source: int, target: int) -> None:
        """Keys and values are all there is: no state a request."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name used in configurations."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
